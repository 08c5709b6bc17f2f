"""`plan` asks a language model for the lengths that the policy's target has."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import small_lms
import small_texts

from compile_stage import api
from compile_stage.core.errors import SourceError

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own deprecations are not what is tested here

POLICY = """\
apiVersion: compile-stage/v1
kind: OptimizationPolicy
name: writer
data: {validation: {source: "file:texts.csv"}, min_samples: 8}
targets:
  cpu: {backends: [onnxruntime], precisions: [fp32], generation: {prompt_tokens: 24, new_tokens: 8}}
"""


@pytest.mark.slow
def test_a_plan_refuses_the_lengths_that_a_run_would_refuse(tmp_path: Path) -> None:
    """Broken: `plan` says that a run would pass, which then ends at once since the network has too few places, or since
    texts make fewer prompts of the policy's length than of the shipped one."""
    pytest.importorskip("transformers", reason="the model is a transformers pipeline")
    uri = f"folder:{small_lms.save(tmp_path / 'writer', 'gpt2')}"
    text = " ".join(small_texts.corpus())
    pd.DataFrame({"text": [text[: 96 * 8]]}).to_csv(tmp_path / "texts.csv", index=False)
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY)

    def generation(prompt_tokens: int, new_tokens: int) -> list[str]:
        return [f"targets.cpu.generation={{prompt_tokens: {prompt_tokens}, new_tokens: {new_tokens}}}"]

    fits = api.plan(uri, policy)
    assert (fits.exit_code, len(fits.jobs)) == (0, 1), fits.problem
    too_few = api.plan(uri, policy, sets=generation(100, 28))
    assert too_few.exit_code != 0
    assert "there are 6 validation samples, fewer than the 8" in too_few.problem
    with pytest.raises(SourceError, match=r"a sample has 129 tokens .* and the model takes 128"):
        api.plan(uri, policy, sets=generation(100, 29))
