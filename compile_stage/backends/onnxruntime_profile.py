"""The profile of an artifact that ONNX Runtime runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_stage.backends import onnxruntime_providers as providers
from compile_stage.backends import onnxruntime_session as sessions
from compile_stage.core.errors import NothingCompiledError
from compile_stage.core.records import Artifact, Profile
from compile_stage.plugin_support.onnxruntime_profiler import profile_session

if TYPE_CHECKING:
    from compile_stage.core.ports import Backend
    from compile_stage.plugin_support.profiling import ProfileRequest


def profile_artifact(backend: Backend, artifact: Artifact, request: ProfileRequest) -> Profile:
    """Profile a session with the options of the one that is measured, on the CPU provider. Another provider runs what
    it takes as one kernel, and what is in it is not in ONNX Runtime's profile.

    Raises:
        NothingCompiledError: It runs on another provider, or not here.
    """
    import onnxruntime

    asked, path = artifact.options, Path(artifact.path) / artifact.entry
    provider = providers.find(str(asked.get("provider", getattr(backend, "default_provider", providers.CPU))))
    if provider is None or provider.name != providers.CPU or asked.get("device"):
        raise NothingCompiledError("only ONNX Runtime's CPU provider is profiled: another one shows as a single kernel")

    def start(options: Any) -> Any:
        return onnxruntime.InferenceSession(str(path), options, providers=[providers.CPU])

    graph = path if path.suffix == ".onnx" else None
    return profile_session(start, sessions.session_options(asked, request.threads), graph, request)
