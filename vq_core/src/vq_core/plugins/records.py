"""What is known of one method that some installed distribution offers."""

from __future__ import annotations

from typing import Any, Literal

import attrs

from vq_core.api.facts import MethodFacts

Status = Literal["ok", "broken", "incompatible", "shadowed", "disabled"]


@attrs.frozen
class MethodRecord:
    """One entry point of the group ``vq.methods``, loaded or not.

    Attributes:
        name: Canonical name of the method.
        status: ``ok``: usable. ``broken``: could not be loaded, or breaks the contract. ``incompatible``: written
            for another API version. ``shadowed``: loads, but another distribution offers the same name, so it has
            to be asked for as ``distribution:name``. ``disabled``: switched off by ``VQ_DISABLE``, not imported.
        distribution: Name of the distribution that offers it.
        version: Version of that distribution.
        entry_point: The entry point's value, such as ``vq_kivi.method``.
        api_version: API version that the method was written for, ``None`` where it could not be asked.
        reason: Why the status is not ``ok``, and the way out, on one line; ``""`` when it is.
        traceback: Text of the traceback, ``""`` where nothing was raised.
        facts: What ``vq_method`` returned, ``None`` where it could not be asked.
        plugin: The plugin object, set when the method can be used (``ok`` or ``shadowed``).
    """

    name: str
    status: Status
    distribution: str
    version: str
    entry_point: str
    api_version: int | None = None
    reason: str = ""
    traceback: str = attrs.field(default="", repr=False)
    facts: MethodFacts | None = attrs.field(default=None, repr=False)
    plugin: Any | None = attrs.field(default=None, repr=False)

    @property
    def label(self) -> str:
        """The name that always means this record: ``distribution:name``."""
        return f"{self.distribution}:{self.name}"

    def as_dict(self) -> dict[str, Any]:
        """Everything that JSON can hold, without the plugin and the traceback."""
        facts = self.facts
        return {
            "name": self.name,
            "status": self.status,
            "distribution": self.distribution,
            "version": self.version,
            "reason": self.reason,
            "summary": facts.summary if facts else "",
            "sides": list(facts.sides) if facts else [],
            "paper": facts.paper if facts else "",
            "api_version": self.api_version,
            "entry_point": self.entry_point,
        }
