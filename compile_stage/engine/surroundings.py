"""What a worker of this machine finds around it: its folders, its environment, the files of its calls."""

from __future__ import annotations

import os
import shutil
import site
import sys
from contextlib import ExitStack
from typing import Any

from compile_stage.core import plugins
from compile_stage.core.errors import CompileStageError, StorageError, WorkerError
from compile_stage.core.leftovers import temporary_folder
from compile_stage.core.ports import WorkerLimits
from compile_stage.core.remote_plugins import IN_WORKER
from compile_stage.engine.confinement import environment_of, folders_of, hands_files_over
from compile_stage.engine.handover import Handover
from compile_stage.engine.watch import gigabytes

_DISK_IS_FULL_BYTES = 64_000_000  # with less free, what did not fit is no riddle

# Each runtime has a name of its own for the size of its default thread pool.
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS", "RAYON_NUM_THREADS", "TVM_NUM_THREADS", "TF_NUM_INTRAOP_THREADS",
)  # fmt: skip

# Threads of OpenMP spin while they wait for each other, on a core that one of them may be waiting for. Beside a process
# that kept one of two cores busy, a call of ResNet-50 in AOTInductor took 247 ms, 127 ms with these, 67 ms alone.
_WITHOUT_SPINNING = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}


class Surroundings:
    """The folders of one worker, made for it and removed with it.

    Attributes:
        folder: Private; holds all the others, and the log.
        own: Its working folder, which it may write to, with its home and its temporary folder.
        interpreter: The Python executable that it runs.
        environment: Its variables.
        reads: Files and folders that it may read, beside its interpreter's and the system's.
    """

    def __init__(self, limits: WorkerLimits) -> None:
        self.interpreter = limits.interpreter or sys.executable
        self._stack = ExitStack()
        self.folder = self._stack.enter_context(temporary_folder("worker"))
        self.own = self.folder / "own"
        self._limits = limits
        self._handover: Handover | None = None
        try:
            if hands_files_over() and not limits.light:
                self._handover = Handover(self.folder, limits.reads)
            self.environment = self._environment()
            self.reads = self._reads()
        except BaseException:
            self.remove()
            raise

    @property
    def folders(self) -> tuple[str, ...]:
        """What is to be removed when the worker is gone."""
        return (str(self.folder), *(self._handover.folders if self._handover else ()))

    @property
    def writes(self) -> tuple[str, ...]:
        """The folders that it may write to."""
        return (str(self.own), *(self._handover.outputs if self._handover else ()))

    @property
    def shared_memory_bytes(self) -> int:
        """The size of its own /dev/shm."""
        return self._limits.memory_bytes // 4

    def hand_over(self, function: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call, with paths that the worker can reach."""
        if self._handover is None:
            return arguments
        if function == "compile_model":
            self._handover.bring_records()
        return self._handover.inward(arguments)

    def hand_back(self, message: dict[str, Any]) -> dict[str, Any]:
        """The answer to a call, with the stage's paths; what the call wrote is there. Raises as `Handover.outward`."""
        if self._handover is None:
            return message
        self._handover.take_records()
        answer: dict[str, Any] = self._handover.outward(message)
        return answer

    def take_records(self) -> None:
        """Keep the tuning records that it wrote until now."""
        if self._handover is not None:
            self._handover.take_records()

    def believed(self, error: CompileStageError) -> CompileStageError:
        """The error of a call; a full disk only where a disk is full: shared memory of its own ends with the same
        error."""
        if isinstance(error, StorageError):
            free = min(shutil.disk_usage(place).free for place in self.writes)
            if free > _DISK_IS_FULL_BYTES:
                most = gigabytes(self.shared_memory_bytes)
                problem = f"no space left, and the disk has {gigabytes(free)} free: its /dev/shm takes at most {most}"
                return WorkerError("out_of_memory", problem)
        return error

    def remove(self) -> None:
        """Delete the folders."""
        if self._handover is not None:
            self._handover.remove()
        self._stack.close()

    def _environment(self) -> dict[str, str]:
        """What is listed of the stage's, and folders of its own in place of the user's."""
        environment = environment_of(os.environ) | dict.fromkeys(_THREAD_VARIABLES, str(max(1, self._limits.cpus)))
        if self._limits.shares_cores:
            environment = _WITHOUT_SPINNING | environment  # what the user has set stands
        for variable, name in (("TMPDIR", "tmp"), ("HOME", "home")):
            folder = self.own / name
            folder.mkdir(parents=True)
            environment[variable] = str(folder)
        environment |= {"PYTHONHASHSEED": "0", IN_WORKER: "1"}
        if self._handover is not None:
            environment["COMPILE_STAGE_CACHE"] = str(self._handover.cache)
        if self.interpreter != sys.executable:
            environment["PYTHONPATH"] = str(plugins.link_packages(self.folder / "linked"))
        elif site.ENABLE_USER_SITE:  # which Python looks for below HOME
            environment["PYTHONUSERBASE"] = site.getuserbase()
        return environment

    def _reads(self) -> list[str]:
        if self.interpreter == sys.executable:
            packages = plugins.folders_of_packages()
        else:
            packages = [str(link.resolve()) for link in (self.folder / "linked").iterdir()]
        handed = self._handover.inputs if self._handover else []
        return [*folders_of(self.environment), *self._limits.reads, *handed, *packages]
