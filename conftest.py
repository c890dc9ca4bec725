"""Runs before any test is imported.

A distribution's folder is called as its package, so pytest names the tests in vq_core/tests
`vq_core.tests.test_x` and would create an empty parent `vq_core` from the folder.  Import the installed
packages first: then the parent exists, and is the real one.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

for _folder in sorted(Path(__file__).parent.glob("vq_*")):
    _spec = find_spec(_folder.name)
    # Without an origin it is that folder, as a namespace package: the distribution is not installed.
    if _spec is not None and _spec.origin is not None:
        import_module(_folder.name)
