"""Models and clusters: presets, Hugging Face ``config.json`` files and YAML files.

| module | content |
| --- | --- |
| `model_spec`, `cluster_spec` | the sizes of a model, and of a cluster |
| `models`, `clusters` | presets, and :func:`~models.get_model` and :func:`~clusters.get_cluster` |
| `huggingface` | from ``config.json`` to a model |
| `spec_files` | from YAML to a model or a cluster |
"""
