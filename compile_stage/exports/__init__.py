"""Published versions in the forms of the servers that people run (`compile-stage export`).

`run.py` has the order of an export, `version.py` what is exported, `folder.py` how an export's folder is written, and
`check.py` how it is shown to answer as the version does. One file a form: `triton.py` (with `triton_config.py` and
`pbtxt.py`), `kserve.py`, `oci.py`, `bentoml.py`. `copied/` holds the two files that run in such a server, and
`stand_in.py` is a program of its own that runs an export without our package.
"""
