# What type checkers and editors read: the names that `__init__.py` imports when they are first used.
from compile_stage.api import compare as compare
from compile_stage.api import debug as debug
from compile_stage.api import doctor as doctor
from compile_stage.api import lint as lint
from compile_stage.api import plan as plan
from compile_stage.api import promote as promote
from compile_stage.api import rollback as rollback
from compile_stage.api import run as run
from compile_stage.api import validate as validate
from compile_stage.api import verify as verify
from compile_stage.core.records import Artifact as Artifact
from compile_stage.core.records import Bundle as Bundle
from compile_stage.core.records import Candidate as Candidate
from compile_stage.core.records import Check as Check
from compile_stage.core.records import Gate as Gate
from compile_stage.core.records import Job as Job
from compile_stage.core.records import Measurement as Measurement
from compile_stage.core.records import Outcome as Outcome
from compile_stage.core.records import Plan as Plan
from compile_stage.core.records import Policy as Policy
from compile_stage.core.records import Receipt as Receipt
from compile_stage.core.records import Refusal as Refusal
from compile_stage.core.records import RunResult as RunResult
from compile_stage.core.records import SampleSet as SampleSet
from compile_stage.core.records import Scheme as Scheme
from compile_stage.core.records import Selection as Selection
from compile_stage.core.records import SourceModel as SourceModel
from compile_stage.core.records import Target as Target
from compile_stage.core.records import TargetPolicy as TargetPolicy
from compile_stage.core.records import TargetResult as TargetResult
from compile_stage.core.records import Timing as Timing
from compile_stage.core.records import Verdict as Verdict
from compile_stage.core.records import Verification as Verification
from compile_stage.core.records import Waiver as Waiver

__version__: str
