"""One line on why a plugin did not load, and what its user can do about it."""

from __future__ import annotations

import sys
import traceback

from pluggy import PluginValidationError


def mlx_install_line() -> str:
    """The pip line that installs MLX on this platform."""
    return "pip install mlx" if sys.platform == "darwin" else "pip install 'vq-core[cpu]'"


def is_missing_mlx(error: BaseException) -> bool:
    """Whether an import failed because MLX is not installed, or on Linux has no backend beside it."""
    if not isinstance(error, ImportError):
        return False
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "mlx":
        return True
    # `pip install mlx` alone on Linux installs mlx.core without the library that it links to.
    return "libmlx" in str(error) or (error.name == "core" and "mlx" in (error.path or ""))


def explain(error: BaseException, *, module: str, distribution: str) -> str:
    """Reason for a record: error class, its message, the way out; always one line.

    Args:
        error: What loading raised.
        module: The module that the entry point names.
        distribution: The distribution that offers it.
    """
    if any(is_missing_mlx(link) for link in _chain(error)):
        return f"needs mlx, which is missing or has no backend here: {mlx_install_line()} ({headline(error)})"
    if isinstance(error, SystemExit):
        return f"SystemExit: {module} calls sys.exit({error.code!r}) while it is loaded; report it to {distribution}"
    if isinstance(error, PluginValidationError):
        # pluggy's message spans lines and starts with the plugin's name, which the record already has.
        text = " ".join(str(error).split())
        return f"PluginValidationError: {text}; see vq_core.hookspecs for the arguments that a hook may take"
    missing = _missing_module(error)
    if missing is None:
        return headline(error)
    if _top(missing) == _top(module):
        advice = f"its code is gone: reinstall it, or pip uninstall {distribution}"
    else:
        advice = f"pip install --upgrade {distribution} installs what it declares, else install it by hand"
    return f"{headline(error)}; {advice}"


def headline(error: BaseException) -> str:
    """``Class: first line of the message``, with file and line for a syntax error."""
    if isinstance(error, SyntaxError):
        file = (error.filename or "?").replace("\\", "/").rpartition("/")[2]
        return f"{type(error).__name__}: {error.msg} ({file}, line {error.lineno})"
    # traceback and not str(): an exception whose __str__ raises must not take the listing down with it.
    text = traceback.format_exception_only(error)[0]
    return text.strip().split("\n")[0].replace("\r", " ")


def _chain(error: BaseException | None) -> list[BaseException]:
    links: list[BaseException] = []
    while error is not None and error not in links:
        links.append(error)
        error = error.__cause__ or error.__context__
    return links


def _missing_module(error: BaseException) -> str | None:
    # Only the error itself and its stated cause: one that was merely being handled says nothing about this one.
    for link in (error, error.__cause__):
        if isinstance(link, ModuleNotFoundError) and link.name:
            return link.name
    return None


def _top(module: str) -> str:
    return module.partition(".")[0]
