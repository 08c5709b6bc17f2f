"""All that the command line, `pipelines/` and notebooks may call.

A model through a policy: `plan`, `run`, `default_out`. A published version: `verify`, `validate`, `validate_on`,
`promote`, `rollback`, `export_version` (with `ExportOptions`), `load_test`. What a run left: `compare`, `report_text`,
`write_report`. Why something went wrong, and where time goes: `debug`, `profile`. Many models: `fleet_plan`,
`fleet_run`, `fleet_requalify`. Policy files: `lint`, `compare_policies`. This machine: `init`, `doctor`, `toolchains`,
`install_toolchain`, `lock_toolchain`, `remove_toolchain`, `cache_entries`, `collect_cache`, `verify_cache`. The
machines of a cluster: `survey`.

Each is written, and explained, in the module that it is imported from here.
"""

from __future__ import annotations

from compile_stage.exports.options import ExportOptions as ExportOptions
from compile_stage.fleet.fleets import fleet_plan as fleet_plan
from compile_stage.fleet.fleets import fleet_requalify as fleet_requalify
from compile_stage.fleet.fleets import fleet_run as fleet_run
from compile_stage.functions.caches import cache_entries as cache_entries
from compile_stage.functions.caches import collect_cache as collect_cache
from compile_stage.functions.caches import verify_cache as verify_cache
from compile_stage.functions.debugging import debug as debug
from compile_stage.functions.devices import validate_on as validate_on
from compile_stage.functions.exports import export_version as export_version
from compile_stage.functions.machine import doctor as doctor
from compile_stage.functions.machine import init as init
from compile_stage.functions.machine import install_toolchain as install_toolchain
from compile_stage.functions.machine import lock_toolchain as lock_toolchain
from compile_stage.functions.machine import remove_toolchain as remove_toolchain
from compile_stage.functions.machine import survey as survey
from compile_stage.functions.machine import toolchains as toolchains
from compile_stage.functions.policies import compare_policies as compare_policies
from compile_stage.functions.policies import lint as lint
from compile_stage.functions.published import promote as promote
from compile_stage.functions.published import rollback as rollback
from compile_stage.functions.published import validate as validate
from compile_stage.functions.published import verify as verify
from compile_stage.functions.results import compare as compare
from compile_stage.functions.results import report_text as report_text
from compile_stage.functions.results import write_report as write_report
from compile_stage.functions.runs import default_out as default_out
from compile_stage.functions.runs import plan as plan
from compile_stage.functions.runs import run as run
from compile_stage.functions.serving import load_test as load_test
from compile_stage.profiling import profile as profile
