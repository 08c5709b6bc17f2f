"""The plug points, a file each.

A plug-in is a class with a constructor that takes no argument and touches nothing heavy; packages are imported inside
the methods that need them. It is found by name through an entry point (`core.plugins`) and declares what it can do in
`capabilities`. `refuse*` answers a capability question with None (can do) or with the reason, in words a user can act
on.
"""

from compile_stage.core.ports.backend import Backend, Lowering, Samples
from compile_stage.core.ports.engine import (
    Confinement,
    Engine,
    MeteredCall,
    Worker,
    WorkerLimits,
    WorkerMemory,
    WorkerUsage,
)
from compile_stage.core.ports.plugin import Plugin, Session
from compile_stage.core.ports.registry import Registry
from compile_stage.core.ports.source import Exporter

__all__ = [
    "Backend", "Confinement", "Engine", "Exporter", "Lowering", "MeteredCall", "Plugin", "Registry", "Samples",
    "Session", "Worker", "WorkerLimits", "WorkerMemory", "WorkerUsage",
]  # fmt: skip
