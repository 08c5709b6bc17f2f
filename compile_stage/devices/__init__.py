"""Published versions validated on machines that are reached over ssh or adb (docs/devices.md).

The machine with the registry sends a folder to the device: the validator (`validator.py`, a zipapp of `agent.py`,
`worker.py` and what these import), the version, and samples. There the artifact answers and is timed; answers and
latencies come back, and are judged here.
"""
