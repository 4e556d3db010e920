"""verl's configuration as ``python -m verl.trainer.main_ppo`` would compose it, without importing verl.

Importing verl takes seconds and a working torch; composing its YAML takes neither. The arguments are those of a Hydra
application, so that a command line can be tried by exchanging the program in front of it. (Hydra's public ``compose``
takes no ``--config-dir``; what is used of its internals is what ``hydra.main`` itself calls.)
"""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict
from omegaconf.errors import OmegaConfBaseException

from verl_sat import resolvers

DEFAULT_NAME = "ppo_trainer"


class CompositionError(ValueError):
    """The arguments do not make a configuration; the text says why, for the user."""


@dataclass(frozen=True)
class Composed:
    """A composed configuration.

    Attributes:
        config: not resolved: interpolations are evaluated when a key is read.
    """

    config: DictConfig


def verl_config_dir(main: str = "verl.trainer") -> Path:
    """Folder of the configurations of a verl entry point, found without importing verl.

    Args:
        main: package whose ``config`` folder it is.
    Raises:
        CompositionError: if verl is not installed.
    """
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise CompositionError("verl is not installed here: pip install 'verl>=0.9,<0.10' (its YAML files are read)")
    folder = Path(next(iter(spec.submodule_search_locations)), *main.split(".")[1:], "config")
    if not folder.is_dir():
        raise CompositionError(f"this verl has no configurations at {folder}")
    return folder


def compose(arguments: list[str]) -> Composed:
    """Compose a configuration.

    Args:
        arguments: as for ``python -m verl.trainer.main_ppo``: overrides, and Hydra's ``--config-name`` (``-cn``),
            ``--config-dir`` (``-cd``) and ``--config-path`` (``-cp``).
    Raises:
        CompositionError: with Hydra's reason, and what to type if it is known.
    """
    options, overrides = _split(arguments)
    resolvers.register()
    main = Path(options.config_path).resolve() if options.config_path else verl_config_dir()
    if not main.is_dir():
        raise CompositionError(f"--config-path {options.config_path}: there is no such folder")
    search_path = create_config_search_path(str(main))
    if options.config_dir:
        folder = Path(options.config_dir).resolve()
        if not folder.is_dir():
            raise CompositionError(f"--config-dir {options.config_dir}: there is no such folder")
        search_path.prepend("command-line", f"file://{folder}", anchor="schema")  # where Hydra puts it
    name = options.config_name.removesuffix(".yaml")
    GlobalHydra.instance().clear()
    try:
        hydra = Hydra.create_main_hydra2("verl_sat", search_path)
        config = hydra.compose_config(
            config_name=name, overrides=overrides, run_mode=RunMode.RUN, from_shell=True, with_log_configuration=False
        )
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise CompositionError(_readable(error)) from error
    finally:
        GlobalHydra.instance().clear()
    with open_dict(config):
        del config["hydra"]
    return Composed(config)


def _split(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config-name", "-cn", default=DEFAULT_NAME)
    parser.add_argument("--config-dir", "-cd", default=None)
    parser.add_argument("--config-path", "-cp", default=None)
    try:
        options, rest = parser.parse_known_args(arguments)
    except (argparse.ArgumentError, SystemExit) as error:
        raise CompositionError(str(error)) from error
    unknown = [argument for argument in rest if argument.startswith("-")]
    if unknown:
        raise CompositionError(
            f"{unknown[0]}: not understood; of Hydra's options --config-name, --config-dir and --config-path are, and "
            "overrides as key=value"
        )
    return options, rest


def _readable(error: BaseException) -> str:
    """Hydra's message with its causes, one after the other, without repeating any."""
    parts: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        text = " ".join(str(cause).split())
        if text and not any(text in part for part in parts):
            parts.append(text)
        cause = cause.__cause__
    return ": ".join(parts)
