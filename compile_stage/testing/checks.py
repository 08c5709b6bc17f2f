"""The checks. Each answers as `refuse` does: None, or the reason."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compile_stage.core.capabilities import BackendCapabilities
from compile_stage.core.digest import canonical_json, digest_tree, load_record, plain, tree_size
from compile_stage.core.environment import hardware
from compile_stage.core.errors import SourceError
from compile_stage.core.records import Artifact, PortableModel, Scheme
from compile_stage.core.tensors import Signature
from compile_stage.measure.predict import require_arrays
from compile_stage.testing.case import PRECISIONS, Case
from compile_stage.testing.comparing import RELATIVE_ERROR, RELATIVE_ERROR_ELSE, differ, off
from compile_stage.testing.fresh_process import in_fresh_process

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array


# ----------------------------------------------------------------------------------------------- what it says of itself


def describes_itself(case: Case) -> str | None:
    """Name, forms, methods and toolchain are there, and are what they should be."""
    backend = case.backend
    for method in ("capabilities_for", "toolchain", "refuse_target", "schemes", "refuse", "compile", "open"):
        if not callable(getattr(backend, method, None)):
            return f"it has no method {method}()"
    for attribute in ("name", "extra"):
        if not isinstance(getattr(backend, attribute, None), str):
            return f"{attribute} must be a string"
    capabilities = getattr(backend, "capabilities", None)
    if not isinstance(capabilities, BackendCapabilities):
        return "capabilities must be a core.capabilities.BackendCapabilities"
    declared = {"requires": getattr(backend, "requires", None)}
    declared |= {
        f"capabilities.{name}": getattr(capabilities, name) for name in ("forms", "devices", "precisions", "runtime")
    }
    for attribute, value in declared.items():
        if not isinstance(value, tuple) or not value or not all(isinstance(item, str) for item in value):
            return f"{attribute} must be a tuple of strings that is not empty"
    toolchain = backend.toolchain()
    if not toolchain or not all(isinstance(k, str) and isinstance(v, str) and v for k, v in toolchain.items()):
        return "toolchain() must name at least one package with its version"
    return None


def plans_without_importing(case: Case) -> str | None:
    """Making the plug-in, `refuse_target` and `schemes` run at plan time: they must not import the compiler."""
    if "planned" not in case.common:  # a process for each scheme would see the same
        task = {"target": plain(case.target), "precisions": list(PRECISIONS)}
        case.common["planned"] = in_fresh_process(case, "plan", task)["loaded"]
    loaded = sorted(set(case.common["planned"]) & set(case.backend.requires))
    return f"planning imported {', '.join(loaded)}" if loaded else None


def declares_schemes(case: Case) -> str | None:
    """Every scheme is of the precision that was asked for and has a name of its own; an unknown precision has none."""
    seen: set[str] = set()
    for precision in PRECISIONS:
        for scheme in case.backend.schemes(case.target, precision):
            if precision not in case.backend.capabilities.precisions:
                return f"it has a scheme for {precision}, which its capabilities.precisions do not list"
            if scheme.precision != precision:
                return f"asked for {precision}, it declares a scheme of {scheme.precision}"
            if not scheme.name or scheme.name in seen:
                return f"two schemes are called {scheme.name!r}" if scheme.name else "a scheme has no name"
            if load_record(Scheme, canonical_json(scheme)) != scheme:
                return f"scheme {scheme.name} does not survive JSON"
            seen.add(scheme.name)
    if case.backend.schemes(case.target, "int17"):
        return "it declares a scheme for int17, a precision that does not exist"
    return None


def offers_tuning_options_that_it_takes(case: Case) -> str | None:
    """A backend that offers settings to try (`tuning_options`) names each once, and takes their options."""
    backend = case.backend
    for target in (case.target, replace(case.target, threads=2, batch_sizes=(1, 8))):
        offered = backend.tuning_options(target, case.scheme)
        if offered and not backend.capabilities_for(target).offers_tuning_options:
            return "it has tuning options, and capabilities.offers_tuning_options is false: nobody would ask for them"
        names = [option.name for option in offered]
        for option in offered:
            if names.count(option.name) > 1:
                return f"two of its tuning options are called {option.name!r}"
            options = {**target.options.get(backend.name, {}), **option.options}
            reason = backend.refuse_target(replace(target, options={backend.name: options}))
            if reason is not None:
                return f"it offers the tuning option {option.name!r}, and refuses its options: {reason}"
    return None


def refuses_in_words(case: Case) -> str | None:
    """A refusal is None or one sentence; what can't be is refused, what can is not."""
    backend = case.backend
    elsewhere = replace(case.target, device="toaster")
    wrong_option = replace(case.target, options={backend.name: {"no_such_option": 1}})
    fixed = replace(case.portable, signature=_fix_batch(case.model, 3))
    shapeless: Any = replace(case.portable, form="clay")  # type: ignore[arg-type]
    for what, reason in (
        ("a device that does not exist", backend.refuse_target(elsewhere)),
        ("an option that does not exist", backend.refuse_target(wrong_option)),
        ("a form that does not exist", backend.refuse(shapeless, case.target)),
        ("a batch size that the model does not take", backend.refuse(fixed, replace(case.target, batch_sizes=(1,)))),
    ):
        if reason is None:
            return f"it does not refuse {what}"
        if not isinstance(reason, str) or len(reason.split()) < 4 or "\n" in reason or "Traceback" in reason:
            return f"its refusal of {what} is not a sentence: {reason!r}"
    if "no_such_option" not in str(backend.refuse_target(wrong_option)):
        return "its refusal of an unknown option does not name the option"
    for reason in (backend.refuse_target(case.target), backend.refuse(case.portable, case.target)):
        if reason is not None:
            return f"it declares {case.scheme.name} and refuses the model: {reason}"
    return None


def _fix_batch(model: PortableModel, size: int) -> Signature:
    inputs = tuple(replace(spec, shape=(size, *spec.shape[1:])) for spec in model.signature.inputs)
    return replace(model.signature, inputs=inputs)


# --------------------------------------------------------------------------------------------------------- the artifact


def writes_its_artifact(case: Case) -> str | None:
    """The record says what lies in the folder, and whose it is."""
    artifact, into = case.artifact, case.folder / "artifact"
    for what, said, true in (
        ("path", Path(artifact.path), into),
        ("digest", artifact.digest, digest_tree(into)),
        ("size_bytes", artifact.size_bytes, tree_size(into)),
        ("backend", artifact.backend, case.backend.name),
        ("precision", artifact.precision, case.scheme.precision),
        ("job_id", artifact.job_id, f"model--{case}"),
        ("made_from", artifact.made_from, case.portable.digest),
        ("hardware", artifact.hardware, hardware().fingerprint),
        ("toolchain", dict(artifact.toolchain), dict(case.backend.toolchain())),
    ):
        if said != true:
            return f"{what} is {said!r} and should be {true!r}"
    return None if (into / artifact.entry).is_file() else f"the entry {artifact.entry!r} is no file of the artifact"


def keeps_names_and_types(case: Case) -> str | None:
    """Inputs and outputs have the model's names, types and order, in the artifact and in the open session; a free batch
    stays free."""
    with case.session() as session:
        signatures = (("artifact", case.artifact.signature), ("session", session.signature))
    for where, found in signatures:
        for word in ("inputs", "outputs"):
            wanted = [(s.name, s.dtype, len(s.shape)) for s in getattr(case.model.signature, word)]
            have = [(s.name, s.dtype, len(s.shape)) for s in getattr(found, word)]
            if wanted != have:
                return f"the {where}'s {word} are {have}, the model's are {wanted}"
        for known, spec in zip(case.model.signature.inputs, found.inputs, strict=True):
            if isinstance(known.batch, str) and isinstance(spec.batch, int):
                return f"the {where} fixed the batch of {spec.name!r} to {spec.batch}"
    return None


def reads_back_what_ran(case: Case) -> str | None:
    """`executed` says which providers took how many nodes, which operators ran, and in what precision."""
    executed = case.artifact.executed
    for key in ("providers", "ops", "precision"):
        if not executed.get(key):
            return f"executed[{key!r}] is empty: nothing was read back"
    for key in ("providers", "ops"):
        if not all(isinstance(count, int) and count > 0 for count in executed[key].values()):
            return f"executed[{key!r}] must count nodes: {executed[key]!r}"
    return None


def survives_json(case: Case) -> str | None:
    """The artifact's record is the same after a trip through canonical JSON."""
    there_and_back = load_record(Artifact, canonical_json(case.artifact))
    return None if there_and_back == case.artifact else "the record changed on the way"


def leaves_nothing_behind(case: Case) -> str | None:
    """Compiling and opening write nothing into the working folder, and opening nothing into the artifact."""
    artifact, before = case.artifact, digest_tree(case.artifact.path)
    with contextlib.chdir(case.workplace), case.backend.open(artifact, 1) as session:
        session.run(case.batch(case.sizes[0]))
    if left := sorted(path.name for path in case.workplace.iterdir()):
        return f"it left {left[0]!r} in the working folder"
    return None if digest_tree(artifact.path) == before else "opening the artifact changed its files"


def is_self_contained(case: Case) -> str | None:
    """Moved to another folder and opened in a fresh process, without the model that it was made from, it answers as
    before."""
    batch = case.batch(case.sizes[0])
    with case.session() as session:
        here = session.run(batch)
    home, away, source = Path(case.artifact.path), case.folder / "away", Path(case.portable.path).parent
    shutil.copytree(home, away, dirs_exist_ok=True)
    given = case.folder / "given"
    given.mkdir(exist_ok=True)
    for position, spec in enumerate(case.model.signature.inputs):
        np.save(given / f"{position}.npy", batch[spec.name])
    with _hidden(home), _hidden(source):
        moved = replace(case.artifact, path=str(away))
        answer = in_fresh_process(case, "run", {"artifact": plain(moved), "given": str(given)})
    there = {name: np.load(given / file, allow_pickle=False) for name, file in answer["outputs"].items()}
    return differ(here, there, exact=False, what="the moved artifact in a fresh process")


@contextlib.contextmanager
def _hidden(path: Path) -> Any:
    aside = path.with_name(f"{path.name}.hidden")
    path.rename(aside)
    try:
        yield
    finally:
        aside.rename(path)


# -------------------------------------------------------------------------------------------------------------- running


def answers_like_the_reference(case: Case) -> str | None:
    """Every output is there, filled, of the declared type, one row a sample, finite where the reference is, and near
    it."""
    limit = RELATIVE_ERROR.get(case.scheme.precision, RELATIVE_ERROR_ELSE)
    with case.session() as session:
        for size in case.sizes:
            batch = case.batch(size)
            expected, answer = case.expected(batch), session.run(batch)
            if list(answer) != list(expected):
                return f"the outputs are {list(answer)}, and should be {list(expected)}"
            for name, wanted in expected.items():
                if (reason := off(name, answer[name], wanted, limit)) is not None:
                    return f"{reason} (batch of {size})"
    return None


def is_deterministic(case: Case) -> str | None:
    """The same batch gets the same answer, bit for bit, twice in a session and in another one."""
    batch = case.batch(case.sizes[-1])
    with case.session() as session:
        first = {name: np.array(value) for name, value in session.run(batch).items()}
        if (reason := differ(first, session.run(batch), exact=True, what="a second run")) is not None:
            return reason
    with case.backend.open(case.artifact, 1) as session:
        return differ(first, session.run(batch), exact=True, what="another session")


def gives_its_arrays_away(case: Case) -> str | None:
    """Outputs are arrays, and belong to the caller: a later run does not change them, and changing them does not change
    a later run."""
    one, other = case.batch(case.sizes[0]), case.batch(case.sizes[0], start=case.samples.count // 2)
    with case.session() as session:
        kept = session.run(one)
        try:
            require_arrays(kept)
        except SourceError as error:
            return error.problem
        copies = {name: np.array(value) for name, value in kept.items()}
        session.run(other)
        if (reason := differ(copies, kept, exact=True, what="the first run's answer, after a second run,")) is not None:
            return reason
        for name, value in kept.items():
            if any(np.shares_memory(value, given) for given in one.values()):
                return f"output {name!r} shares its memory with an input"
            if not value.flags.writeable:
                return f"output {name!r} is read-only"
            value[...] = np.zeros((), dtype=value.dtype)
        return differ(copies, session.run(one), exact=True, what="a run after its outputs were overwritten")


def answers_in_any_thread(case: Case) -> str | None:
    """A server calls from whichever of its threads is free: not from the one that opened the session, one after the
    other, each within what its thread has set."""
    batches = [case.batch(case.sizes[-1], start=start) for start in (0, case.samples.count // 2)]
    with case.session() as session:
        expected = [{name: np.array(value) for name, value in session.run(batch).items()} for batch in batches]
        for batch, wanted in zip([*batches, *batches], [*expected, *expected], strict=True):
            with ThreadPoolExecutor(1) as other:
                try:
                    answer = other.submit(session.run, batch).result()
                except Exception as error:  # noqa: BLE001 - whatever a runtime raises
                    return f"called from another thread it raises {type(error).__name__}: {error}"
            if (reason := differ(wanted, answer, exact=False, what="a call from another thread")) is not None:
                return reason
        return differ(expected[0], session.run(batches[0]), exact=False, what="a call after those of other threads")


def takes_every_batch_size(case: Case) -> str | None:
    """A row's answer does not depend on its neighbours (where the batch is free)."""
    if len(case.sizes) == 1:
        return None
    size = case.sizes[-1]
    # Dynamic quantisation takes one range from the whole batch, so there a row does depend on its neighbours.
    limit = RELATIVE_ERROR["fp32"] if case.scheme.precision == "fp32" else RELATIVE_ERROR_ELSE
    with case.session() as session:
        whole = {name: np.array(value) for name, value in session.run(case.batch(size)).items()}
        for row in range(size):
            for name, value in session.run(case.batch(1, start=row)).items():
                if (reason := off(name, value, whole[name][row : row + 1], limit)) is not None:
                    return f"row {row} alone is not what it is in a batch of {size}: {reason}"
    return None


def refuses_wrong_input(case: Case) -> str | None:
    """A batch that does not fit raises, with words, and the session works on."""
    good = case.batch(case.sizes[0])
    spec = case.model.signature.inputs[0]
    array = good[spec.name]
    wrong: dict[str, dict[str, Array]] = {
        "a missing input": {name: value for name, value in good.items() if name != spec.name},
        "an unknown input": {**good, "no_such_input": array},
        "another dtype": {**good, spec.name: array.astype("float64" if array.dtype != np.float64 else "float32")},
        "another rank": {**good, spec.name: array[..., None]},
        "an empty batch": {**good, spec.name: array[:0]},
    }
    with case.session() as session:
        before = {name: np.array(value) for name, value in session.run(good).items()}
        for what, batch in wrong.items():
            try:
                session.run(batch)
            except Exception as error:  # noqa: BLE001 - any error will do, silence will not
                if not str(error).strip():
                    return f"{what} raises an error without words"
            else:
                return f"{what} is taken without an error"
        return differ(before, session.run(good), exact=True, what="a run after a wrong one")


def ends_with_its_context(case: Case) -> str | None:
    """Two sessions can be open at once, and neither can be used once its context has ended."""
    batch = case.batch(case.sizes[0])
    with case.backend.open(case.artifact, 1) as session, case.backend.open(case.artifact, 2) as other:
        reason = differ(session.run(batch), other.run(batch), exact=False, what="a second session with two threads")
    if reason is not None:
        return reason
    try:
        session.run(batch)
    except Exception:  # noqa: BLE001 - any error will do, an answer will not
        return None
    return "the session still answers after its context has ended"


def follows_others_as_it_says(case: Case) -> str | None:
    """Where jobs may follow each other in one process, compiling again there writes the same bytes."""
    first = case.artifact.digest
    if not case.backend.capabilities_for(case.target).follows_others:
        return None
    case.compile_into(again := case.folder / "again")
    if digest_tree(again) == first:
        return None
    return "compiled again in the same process it has other bytes: its capabilities say `follows_others`"


CHECKS: Mapping[str, Callable[[Case], str | None]] = {
    check.__name__: check
    for check in (
        describes_itself,
        plans_without_importing,
        declares_schemes,
        offers_tuning_options_that_it_takes,
        refuses_in_words,
        writes_its_artifact,
        follows_others_as_it_says,
        keeps_names_and_types,
        reads_back_what_ran,
        survives_json,
        leaves_nothing_behind,
        is_self_contained,
        answers_like_the_reference,
        is_deterministic,
        gives_its_arrays_away,
        answers_in_any_thread,
        takes_every_batch_size,
        refuses_wrong_input,
        ends_with_its_context,
    )
}
