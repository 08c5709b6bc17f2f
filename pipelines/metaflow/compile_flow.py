"""A Metaflow flow that calls the stage:

    python compile_flow.py run --model_uri models:/fraud@candidate --policy policies/cpu-server.yaml

The stage may live in an environment of its own: `COMPILE_STAGE` in the environment is its executable, `compile-stage`
on the path without it. Arguments are a list, which no shell reads. The policy travels as text, so that a step on
another machine has it and the run records it. One that `extends` another file needs that file there, by an absolute
path, and its folder as a policy root: `--arguments '["--policy-root", "/policies"]'`, or `COMPILE_STAGE_POLICY_ROOT` in
the step's environment.
"""

import json
import os
import subprocess
import tempfile
from pathlib import Path

from metaflow import FlowSpec, IncludeFile, JSONType, Parameter, card, current, step
from metaflow.cards import Markdown

GATE_FAILED = 3


class CompileFlow(FlowSpec):
    """Compile a registered model under a policy, prove and measure what came out, publish it."""

    model_uri = Parameter("model_uri", required=True, help="models:/NAME/VERSION, models:/NAME@ALIAS, runs:/...")
    policy = IncludeFile("policy", required=True, help="The policy file")
    targets = Parameter("targets", type=JSONType, default="[]", help='JSON list, ["cpu"]; all of them when empty')
    arguments = Parameter("arguments", type=JSONType, default="[]", help='JSON list, ["--no-promote"]')

    @card(type="blank")
    @step
    def start(self):
        """Run the stage; keep result.json, report.html and junit.xml as artifacts, also when a gate failed."""
        with tempfile.TemporaryDirectory() as folder:
            policy_file, out = Path(folder, "policy.yaml"), Path(folder, "out")
            policy_file.write_text(self.policy, encoding="utf-8")
            executable = os.environ.get("COMPILE_STAGE", "compile-stage")
            command = [executable, "run", "--policy", str(policy_file), "--out", str(out)]
            for target in self.targets:
                command += ["--target", target]
            command += [*self.arguments, "--", self.model_uri]
            self.exit_code = subprocess.run(command, check=False).returncode  # noqa: S603 (a list: no shell reads it)
            if self.exit_code not in (0, GATE_FAILED):
                message = f"compile-stage ended with exit code {self.exit_code}; its messages are above"
                raise RuntimeError(message)
            self.result = json.loads((out / "result.json").read_text(encoding="utf-8"))
            self.report_html = (out / "report.html").read_text(encoding="utf-8")
            self.junit_xml = (out / "junit.xml").read_text(encoding="utf-8")
            current.card.append(Markdown((out / "report.md").read_text(encoding="utf-8")))
            # The stage has just named files that nobody finds after this.
            print(f"{out} is removed: the reports are artifacts of this step, and its card")
        self.next(self.gate)

    @step
    def gate(self):
        """Fail where a gate failed: a step that fails keeps no artifacts, so this is one of its own."""
        if self.exit_code:
            message = f"compile-stage ended with exit code {self.exit_code}: {self.result['problem']}"
            raise RuntimeError(message)
        self.next(self.end)

    @step
    def end(self):
        """Name what was published, for flows that go on with it."""
        self.published = {one["name"]: (one["receipt"] or {}).get("uri") for one in self.result["targets"]}


if __name__ == "__main__":
    CompileFlow()
