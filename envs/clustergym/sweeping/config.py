"""Sweep files: validated with the schema of wandb, and turned into the commands that the wandb agent would run."""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clustergym.common.extras import require
from clustergym.common.files import write_atomically

DEFAULT_COMMAND = ["${env}", "${interpreter}", "${program}", "${args}"]
METHODS = ("grid", "random", "bayes")
_ENVIRONMENT = re.compile(r"\$\{envvar:([A-Z0-9_]*)\}")
# Keys that the wandb service accepts, but not the older schema of the package.
_SERVICE_KEYS = ("run_cap",)


def sweeps_package() -> Any:
    """The ``sweeps`` package of wandb, without its warnings about the version of pydantic."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return require("sweeps", "sweep")


@dataclass(frozen=True)
class Sweep:
    """A validated sweep file."""

    path: Path
    config: dict[str, Any]
    """The content of the file, without ``run_cap``."""
    run_cap: int | None

    @property
    def method(self) -> str:
        return str(self.config["method"])

    @property
    def program(self) -> str:
        return str(self.config.get("program", ""))

    @property
    def uses_program(self) -> bool:
        return "${program}" in list(self.config.get("command", DEFAULT_COMMAND))

    @property
    def metric(self) -> str | None:
        return self.config["metric"]["name"] if "metric" in self.config else None

    @property
    def maximise(self) -> bool:
        """Whether the metric is maximised. The default of wandb is to minimise."""
        return bool(self.config.get("metric", {}).get("goal", "minimize") == "maximize")

    @property
    def early_terminate(self) -> bool:
        return "early_terminate" in self.config

    def command(self, parameters: dict[str, Any], folder: Path) -> list[str]:
        """The command line of a run, with the macros replaced as the wandb agent does.

        A file for ``${args_json_file}`` is written to ``folder``.
        """
        flags = [f"--{key}={value}" for key, value in parameters.items()]
        macros = {
            "env": ["/usr/bin/env"] if os.name != "nt" else [],
            "interpreter": [sys.executable],
            "program": [self.program],
            "args": flags,
            "args_no_hyphens": [flag[2:] for flag in flags],
            "args_no_equals": [part for key, value in parameters.items() for part in (f"--{key}", str(value))],
            "args_no_boolean_flags": [
                f"--{key}" if isinstance(value, bool) else f"--{key}={value}"
                for key, value in parameters.items()
                if value is not False
            ],
            "args_append_hydra": [f"+{flag[2:]}" for flag in flags],
            "args_override_hydra": [f"++{flag[2:]}" for flag in flags],
            "args_json": [json.dumps(parameters)],
        }
        words: list[str] = []
        for word in (str(part) for part in self.config.get("command", DEFAULT_COMMAND)):
            name = word[2:-1] if word.startswith("${") and word.endswith("}") else ""
            if name == "args_json_file":
                file = folder / "args.json"
                write_atomically(file, macros["args_json"][0])
                words.append(str(file))
            elif name in macros:
                words += macros[name]
            elif name and not name.startswith("envvar:"):
                raise ValueError(f"{self.path}: unknown macro {word}; the macros are: {', '.join(macros)}, envvar:NAME")
            else:
                # An unset variable is replaced by its name, as the wandb agent does.
                words.append(_ENVIRONMENT.sub(lambda match: os.environ.get(match[1], match[1]), word))
        return words


def load_sweep(path: Path) -> Sweep:
    """Read a sweep file. Raises a ValueError if wandb would refuse it."""
    yaml = require("yaml", "sweep")
    if not path.is_file():
        raise ValueError(f"no sweep file at {path}")
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not valid YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected a mapping with method and parameters, found {type(config).__name__}")
    cap = config.get("run_cap")
    if cap is not None and (isinstance(cap, bool) or not isinstance(cap, int) or cap < 1):
        raise ValueError(f"{path}: run_cap is {cap!r}: expected an integer of at least 1")
    known = {key: value for key, value in config.items() if key not in _SERVICE_KEYS}
    if not isinstance(known.get("parameters"), dict) or not known["parameters"]:
        raise ValueError(f"{path}: no parameters to sweep over")
    wrong = sweeps_package().schema_violations_from_proposed_config(known)
    if wrong:
        raise ValueError(f"{path}: {'; '.join(wrong)}")
    if known.get("method") not in METHODS:
        raise ValueError(f"{path}: method {known.get('method')!r} cannot run locally; expected {', '.join(METHODS)}")
    if "${program}" in known.get("command", DEFAULT_COMMAND) and not known.get("program"):
        raise ValueError(f"{path}: no program: name the script to run")
    if (known["method"] == "bayes" or "early_terminate" in known) and "metric" not in known:
        raise ValueError(f"{path}: {'bayes' if known['method'] == 'bayes' else 'early_terminate'} needs a metric")
    return Sweep(path, known, cap)


def flat(parameters: dict[str, Any]) -> dict[str, Any]:
    """{name: value} with plain Python numbers, from the {name: {"value": value}} of a proposer."""
    return {
        key: _plain(value["value"] if isinstance(value, dict) and "value" in value else value)
        for key, value in parameters.items()
    }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return flat(value)
    return value.item() if hasattr(value, "item") else value
