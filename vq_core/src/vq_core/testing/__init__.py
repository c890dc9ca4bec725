"""The conformance kit: what every method has to satisfy, as pytest classes that a method's package subclasses.

    from vq_core.testing import MethodConformance

    class TestMine(MethodConformance):
        method = "mine:bits=4"

That is a whole test file.  The tests are driven by what the method declares (:class:`vq_core.api.Capabilities`,
its sides and its settings); what does not apply is skipped, with the capability as the reason (``pytest -ra``
prints them).  Class attributes change what is run, see :class:`Kit`; a single test is overridden like any method.

Needs pytest and hypothesis: ``pip install 'vq-core[test]'``.
"""

try:
    import hypothesis  # noqa: F401
    import pytest
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"the conformance kit needs {error.name}: pip install 'vq-core[test]'", name=error.name
    ) from error

# The kit's assertions should show their operands in the author's terminal as those of a test file do.
pytest.register_assert_rewrite(
    *(
        f"vq_core.testing.{part}"
        for part in (
            "attention", "codec", "determinism", "growth", "kernels", "memory", "numbers", "observe", "parity",
            "protocol", "refusals", "rows", "snippets", "trimming",
        )
    )
)  # fmt: skip

from vq_core.testing.attention import AttentionConformance  # noqa: E402
from vq_core.testing.codec import CodecConformance  # noqa: E402
from vq_core.testing.determinism import DeterminismConformance  # noqa: E402
from vq_core.testing.growth import GrowthConformance  # noqa: E402
from vq_core.testing.kernels import KernelConformance  # noqa: E402
from vq_core.testing.kit import Kit  # noqa: E402
from vq_core.testing.memory import MemoryConformance  # noqa: E402
from vq_core.testing.numbers import NumbersConformance  # noqa: E402
from vq_core.testing.parity import Break, BrokenKernels, KernelParity, variants  # noqa: E402
from vq_core.testing.protocol import ProtocolConformance  # noqa: E402
from vq_core.testing.refusals import RefusalsConformance  # noqa: E402
from vq_core.testing.registering import load_plugin, registered  # noqa: E402
from vq_core.testing.rows import RowsConformance  # noqa: E402
from vq_core.testing.snippets import SnippetConformance  # noqa: E402
from vq_core.testing.trimming import TrimmingConformance  # noqa: E402


class MethodConformance(
    CodecConformance,
    NumbersConformance,
    DeterminismConformance,
    GrowthConformance,
    MemoryConformance,
    TrimmingConformance,
    RowsConformance,
    ProtocolConformance,
    AttentionConformance,
    KernelConformance,
    SnippetConformance,
    RefusalsConformance,
):
    """Everything the kit asks of a method. Subclass it, name the class ``Test...``, set ``method``."""


__all__ = [
    "AttentionConformance",
    "Break",
    "BrokenKernels",
    "CodecConformance",
    "DeterminismConformance",
    "GrowthConformance",
    "KernelConformance",
    "KernelParity",
    "Kit",
    "MemoryConformance",
    "MethodConformance",
    "NumbersConformance",
    "ProtocolConformance",
    "RefusalsConformance",
    "RowsConformance",
    "SnippetConformance",
    "TrimmingConformance",
    "load_plugin",
    "registered",
    "variants",
]
