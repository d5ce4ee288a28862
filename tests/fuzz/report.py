"""A finding as a program that runs by itself, and what a session has seen, in numbers."""

from __future__ import annotations

from .judge import FOUR, Outcome, mesh_of, num_micro_batches
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
    arguments = {
        "data_parallel": f"devices={devices}",
        "model_parallel": f"devices={devices[:2]}",
        "tensor_parallel": f"devices={devices[:2]}",
        "pipeline_parallel": f"devices={devices[:2]}, num_micro_batches="
        f"{num_micro_batches(program)}, schedule={program.schedule!r}, balance='memory', "
        "allow_empty_stages=True",
        "hybrid_parallel": f"tfparallel.Mesh{mesh_of(program)}, {FOUR}, num_micro_batches="
        f"{mesh_of(program)[1]}, schedule={program.schedule!r}, balance='memory', "
        "allow_empty_stages=True",
        "workers": "tfparallel.MultiWorkerMirroredStrategy()",
    }[form]
    builder = "data_parallel" if form == "workers" else form
    compiled = "compile_model(model)"
    if program.start == "function":
        return [f"model = tfparallel.{builder}(build_model, {arguments})", compiled]
    lines = ["model = build_model()", f"model = tfparallel.{builder}(model, {arguments})"]
    lines.insert(1 if program.start == "compiled" else 2, compiled)
    return lines


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
    lines.append(f"Of known families: {session.known.total()}")
    lines += [f"  {n} x {text}" for text, n in session.known.most_common()]
    silent = sum(found.count for found in session.found if found.outcome.verdict != "crash")
    crashes = sum(found.count for found in session.found if found.outcome.verdict == "crash")
    lines.append(f"New: {silent} silent differences, {crashes} crashes")
    for found in session.found:
        lines.append(
            f"  {found.count} x {found.outcome.form}: {found.outcome.verdict}: "
            f"{found.outcome.detail[:200]}"
        )
    return "\n".join(lines)
