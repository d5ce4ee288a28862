"""A finding as a program that runs by itself, and what a session has seen, in numbers."""

from __future__ import annotations

import math

from . import workers
from .judge import (
    FOUR,
    SEQUENCE,
    SHARED_OPTIMIZER,
    SHARED_PARAMETERS,
    Outcome,
    mesh_of,
    num_micro_batches,
    schedule_of,
    sequence_mesh_of,
)
from .program import Program, source

LINE = "# " + "-" * 78
MAIN = """\
if __name__ == "__main__":
    import tfparallel

    tfparallel.devices.split_cpu(4)

    def trained(make):
        keras.backend.clear_session()
        keras.utils.set_random_seed(7)
        model = make()
        seen = train(model)
        return {{v.path: v.numpy() for v in model.variables}}, seen

    def on_one_device():
        model = build_model()
        compile_model(model)
        return model

    def under_the_form():
{form}
        return model

    (weights, seen), (others, beside) = trained(on_one_device), trained(under_the_form)
    print(seen, beside, sep="\\n")
    for path, value in weights.items():
        print(path, np.abs(value - others[path]).max())
"""


def of_form(program: Program, form: str) -> list[str]:
    """The lines that make and compile the model under a form."""
    devices = [f"CPU:{index}" for index in range(program.replicas)]
    if form == "MirroredStrategy":
        lines = [
            f"with tfparallel.MirroredStrategy({devices}).scope():",
            "    model = build_model()",
            "    compile_model(model)",
        ]
        return lines

    def on_mesh(mesh, more=""):
        return "hybrid_parallel", (
            f"tfparallel.Mesh{mesh}, {FOUR[: math.prod(mesh)]}, num_micro_batches={mesh[1]}, "
            f"schedule={schedule_of(program, mesh)!r}, balance='memory', "
            f"allow_empty_stages=True{more}"
        )

    on_workers = "tfparallel.MultiWorkerMirroredStrategy()"
    sharing = "data_parallel", f"devices={devices}, shard='optimizer'"
    if program.replicas == 4:
        sharing = on_mesh((2, 1, 2), ", shard='optimizer'")
    builder, arguments = {
        "data_parallel": ("data_parallel", f"devices={devices}"),
        "model_parallel": ("model_parallel", f"devices={devices[:2]}"),
        "tensor_parallel": ("tensor_parallel", f"devices={devices[:2]}"),
        "pipeline_parallel": (
            "pipeline_parallel",
            f"devices={devices[:2]}, num_micro_batches={num_micro_batches(program)}, "
            f"schedule={program.schedule!r}, balance='memory', allow_empty_stages=True",
        ),
        "hybrid_parallel": on_mesh(mesh_of(program)),
        SHARED_OPTIMIZER: sharing,
        SHARED_PARAMETERS: ("data_parallel", f"devices={devices}, shard='parameters'"),
        SEQUENCE: on_mesh(sequence_mesh_of(program)),
        workers.NAME: ("data_parallel", on_workers),
        workers.name_of("optimizer"): ("data_parallel", f"{on_workers}, shard='optimizer'"),
        workers.name_of("parameters"): ("data_parallel", f"{on_workers}, shard='parameters'"),
    }[form]
    compiled = "compile_model(model)"
    # As the judge has it: what the replicas share out is of any size.
    lines = ["from tfparallel.replication import sharding", "sharding._FEWEST = 2"]
    lines = lines if form.endswith(SHARED_PARAMETERS) else []
    if program.start == "function":
        return [*lines, f"model = tfparallel.{builder}(build_model, {arguments})", compiled]
    building = ["model = build_model()", f"model = tfparallel.{builder}(model, {arguments})"]
    building.insert(1 if program.start == "compiled" else 2, compiled)
    return [*lines, *building]


def report(program: Program, outcome: Outcome) -> str:
    """A finding as a program that runs by itself, with what it shows and its JSON."""
    form = "\n".join(" " * 8 + line for line in of_form(program, outcome.form))
    return "\n".join(
        [
            LINE,
            f"# {outcome.form}: {outcome.verdict}: {outcome.detail}",
            f"# {program.to_json()}",
            source(program),
            "",
            MAIN.format(form=form),
            LINE,
        ]
    )


def summary(session) -> str:
    """What a session of `run` has seen."""
    forms = list(dict.fromkeys(form for form, _ in sorted(session.pairs)))
    lines = [f"Seed {session.seed}: {sum(session.pairs.values())} pairs of program and form."]
    for form in forms:
        counts = {v: n for (f, v), n in sorted(session.pairs.items()) if f == form}
        text = ", ".join(f"{number} {verdict}" for verdict, number in counts.items())
        lines.append(f"  {form}: {sum(counts.values())}: {text}")
    lines.append(f"Discarded, as one device does not train them: {session.discarded.total()}")
    lines += [f"  {n} x {text}" for text, n in session.discarded.most_common()]
    lines.append(f"Refused: {session.refusals.total()}")
    lines += [f"  {n} x {form}: {text}" for (form, text), n in session.refusals.most_common()]
    lines.append(f"Of known families: {session.num_known.total()}")
    lines += [f"  {n} x {text}" for text, n in session.num_known.most_common()]
    silent = sum(
        finding.count for finding in session.findings if finding.outcome.verdict != "crash"
    )
    crashes = sum(
        finding.count for finding in session.findings if finding.outcome.verdict == "crash"
    )
    lines.append(f"New: {silent} silent differences, {crashes} crashes")
    for finding in session.findings:
        lines.append(
            f"  {finding.count} x {finding.outcome.form}: {finding.outcome.verdict}: "
            f"{finding.outcome.detail[:200]}"
        )
    return "\n".join(lines)
