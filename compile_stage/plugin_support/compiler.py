"""What most of our backends answer alike to the stage's questions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from compile_stage.core.ports import Backend
from compile_stage.core.records import PortableModel, Target
from compile_stage.plugin_support.artifacts import refuse_form
from compile_stage.plugin_support.options import Option, refuse_options


class Compiler(Backend):
    """A backend that refuses other devices than its own, options that it does not have, and models of another form.

    Attributes:
        options: What each of its options in a policy may be; none unless it lists some.
    """

    options: ClassVar[Mapping[str, Option]] = {}

    def refuse_target(self, target: Target) -> str | None:
        return super().refuse_target(target) or refuse_options(self.name, self.options, target)

    def refuse(self, model: PortableModel, target: Target) -> str | None:
        return refuse_form(self, model, target)
