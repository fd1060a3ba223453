"""Expert offloading: a model is larger than GPU memory, so experts are loaded, prefetched and evicted as it decodes."""
