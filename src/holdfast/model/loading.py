"""Loads the network of an application, given as `path/to/app.py` or `package.module:name`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback

from holdfast.errors import HoldfastError, SetupError
from holdfast.model.network import Network

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def load(app: str) -> Network:
    """Import the application and return its network. An error in the application is raised as a
    SetupError that names the user's file and line."""
    target, _, attribute = app.partition(":")
    try:
        if target.endswith(".py") or os.path.sep in target:
            if not os.path.exists(target):
                raise SetupError(
                    f"there is no application file {target} in {os.getcwd()}; check the path"
                )
            name = "holdfast_app_" + os.path.splitext(os.path.basename(target))[0]
            spec = importlib.util.spec_from_file_location(name, target)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            sys.path.insert(0, os.path.dirname(os.path.abspath(target)))
            spec.loader.exec_module(module)
        else:
            sys.path.insert(0, os.getcwd())
            module = importlib.import_module(target)
    except HoldfastError:
        raise
    except Exception as err:
        raise SetupError(
            f"application {app!r} cannot be imported: {type(err).__name__}: {err}{_where(err)}"
        ) from err
    networks = {
        id(value): (key, value) for key, value in vars(module).items() if isinstance(value, Network)
    }
    if attribute:
        network = getattr(module, attribute, None)
        if not isinstance(network, Network):
            found = type(network).__name__ if hasattr(module, attribute) else "no such name"
            raise SetupError(
                f"application {app!r}: expected {attribute!r} to be an hf.Network, found {found}; "
                f"the networks of {target} are: {_names(networks)}"
            )
        return network
    if not networks:
        raise SetupError(
            f"application {app!r} has no hf.Network at module level; assign one, such as "
            "net = hf.Network('name')"
        )
    if len(networks) > 1:
        raise SetupError(
            f"application {app!r} has {len(networks)} networks ({_names(networks)}); choose one "
            f"with {target}:NAME"
        )
    return next(iter(networks.values()))[1]


def _names(networks: dict[int, tuple[str, Network]]) -> str:
    return ", ".join(key for key, _ in networks.values()) or "none"


def _where(err: Exception) -> str:
    """The innermost line of the traceback outside Holdfast, Python and installed packages."""
    installed = ("/site-packages/", "/dist-packages/", "/lib/python3.", "<frozen ")
    for frame in reversed(traceback.extract_tb(err.__traceback__)):
        file = frame.filename
        if not file.startswith(_OURS) and not any(part in file for part in installed):
            return f", at {file}:{frame.lineno}"
    return ""
