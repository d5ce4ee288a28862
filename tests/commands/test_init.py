"""`tfparallel init`: what it writes runs, and it writes over nothing."""

import os
import pty
import subprocess
import sys

import keras
import numpy as np
import pytest

import tfparallel
from tests.commands.command_line import ROOT
from tests.commands.command_line import tfparallel as run
from tfparallel.commands.main import main
from tfparallel.starter_tasks.kinds import KINDS
from tfparallel.task import load_task


@pytest.fixture
def data_files(tmp_path):
    random = np.random.default_rng(0)
    images = random.integers(256, size=(90, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "images.npz", x=images, y=random.integers(3, size=90))
    rows = [
        f"{i},{random.normal():.4f},{random.normal():.4f},{'ab'[i % 2]},{'low high'.split()[i % 2]}"
        for i in range(90)
    ]
    (tmp_path / "rows.csv").write_text("\n".join(["id,first,second,name,class", *rows]) + "\n")
    (tmp_path / "text.txt").write_text("All the world's a stage. " * 300)
    np.savez(tmp_path / "series.npz", x=np.sin(np.arange(400) / 9))
    return tmp_path


CASES = [
    *((kind, None, ()) for kind in KINDS),
    ("image", "images.npz", ()),
    ("table", "rows.csv", ()),
    ("table", "rows.csv", ("--target=second",)),
    ("series", "rows.csv", ("--target=second",)),
    ("series", "series.npz", ()),
    ("text", "text.txt", ()),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "data", "more"), CASES, ids=[" ".join([k, d or "", *m]) for k, d, m in CASES]
)
def test_what_it_writes_trains(data_files, capsys, kind, data, more):
    path = data_files / "mine.py"
    named = [f"--data={data_files / data}"] if data else []
    assert main(["init", str(path), f"--kind={kind}", *named, *more]) == 0
    assert f"tfparallel train {path} --parallel=data --num_devices=2" in capsys.readouterr().out
    task = load_task(str(path))
    (x, y), validation = task.load_data()
    model = task.build_model()
    task.compile_model(model)
    few = slice(0, 64)
    losses = model.fit(x[few], y[few], batch_size=16, epochs=5, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    assert len(validation[0]) >= 2
    assert str(data_files) not in path.read_text().partition('"""\n\n')[2], "it can be moved along"


@pytest.mark.slow
@pytest.mark.parametrize("form", ["data", "tensor"])
def test_what_it_writes_passes_check(tmp_path, form):
    path = tmp_path / "mine.py"
    assert main(["init", str(path), "--kind=table", f"--parallel={form}"]) == 0
    task = load_task(str(path))
    report = tfparallel.check(
        task.build_model, task.compile_model, task.load_data()[0], parallel=form, steps=3,
        devices=["CPU:0", "CPU:1"],
    )  # fmt: skip
    assert report.passed


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_its_commands_run(tmp_path, kind):
    path = tmp_path / "mine.py"
    code, shown, said = run("init", path, f"--kind={kind}")
    assert code == 0, said
    commands = [line.split() for line in shown.splitlines() if line.startswith("  tfparallel ")]
    assert [words[1] for words in commands] == ["train", "check"]
    for words in commands:
        code, shown, said = run(*words[1:])
        assert code == 0, shown + said


def test_nothing_is_written_over(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text("precious = 1\n")
    assert main(["init", str(path), "--kind=table"]) == 2
    assert "add --force" in capsys.readouterr().err and path.read_text() == "precious = 1\n"
    assert main(["init", str(path), "--kind=table", "--force"]) == 0
    assert "build_model" in path.read_text()


def test_at_a_terminal_it_asks(tmp_path):
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "tfparallel", "init", str(tmp_path / "mine.py")],
        cwd=ROOT,
        stdin=theirs,
        stdout=subprocess.PIPE,
        text=True,
    )
    os.close(theirs)
    # A kind that there is not, one that there is, the sample, and the form that is suggested.
    os.write(ours, b"picture\ntable\n\n\n")
    shown, _ = process.communicate(timeout=60)
    os.close(ours)
    assert process.returncode == 0
    assert "It must be one of image, table, text, series." in shown
    assert "wrote" in shown and (tmp_path / "mine.py").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mine.txt", "--kind=table"], "must end in .py. Received: 'mine.txt'"),
        (["a.py", "b.py"], "writes one file"),
        (["no/a.py"], "does not exist. Received: 'no/a.py'"),
        (["--kind=image", "--data=a.csv"], "ends in .npz"),
        (["--kind=table", "--data=absent.csv"], "does not exist. Received: --data=absent.csv"),
        (["--kind=table", "--target=a"], "--target names a column of a .csv file"),
        (["--kind=image", "--data=series.npz"], "missing: y"),
        (["--kind=table", "--data=rows.csv", "--target=no"], "--target=no"),
        (["--data=rows.npz"], "--kind is required. Received: no --kind. Add --kind=image|table"),
    ],
)
def test_mistakes(data_files, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(data_files)
    monkeypatch.setattr(sys, "stdin", open(os.devnull))
    assert main(["init", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list(data_files.glob("*.py"))


BROKEN = {
    "no file": ("a.npz", None, "The data file does not exist. Received: --data=a.npz"),
    "a short line": (
        "a.csv",
        b"a,b,c\n1,2,3\n4,5\n",
        "where line 3 has 2 of 3 fields",
    ),
    "a long line": ("a.csv", b"a,b\n1,2\n4,5,6\n", "where line 3 has 3 of 2 fields"),
    "semicolons": (
        "a.csv",
        b"a;b\n1,5;2\n",
        "Columns must be separated by commas, but this file uses ';'. Received: --data=a.csv,",
    ),
    "a missing number": (
        "a.csv",
        b"a,b\n1,2\n,3\n4,5\n",
        "whose column 'a' is empty in 1 of 3 rows, first in row 2. Fill in a number",
    ),
    "tabs": ("a.csv", b"a\tb\n1\t2\n", "this file uses tabs"),
    "another encoding": ("a.csv", b"a,b\n\xff,1\n", "The data file cannot be read"),
    "an empty table": ("a.csv", b"", "with 0 rows, columns []"),
    "an empty archive": ("a.npz", b"", "Received: --data=a.npz, empty. Write it: np.savez("),
    "a damaged archive": ("a.npz", b"PK\x03\x04 and more", "a file of 13 bytes that is damaged"),
    "a pickle": ("a.npz", b"\x80\x04]\x94.", "must be a .npz file, as written by NumPy"),
}


@pytest.mark.parametrize(
    ("name", "content", "message"), list(BROKEN.values()), ids=list(BROKEN)
)
def test_a_data_file_that_cannot_be_read(tmp_path, monkeypatch, capsys, name, content, message):
    """Story: some of these ended in a traceback, and a damaged .npz in NumPy's word on pickles."""
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert main(["init", "--kind=table", f"--data={name}"]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("*.py"))


def test_an_archive_that_breaks_off_in_an_array(tmp_path, capsys):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=np.random.default_rng(0).normal(size=(60, 2)), y=np.zeros(60))
    content = bytearray(path.read_bytes())
    content[200:260] = bytes(60)
    path.write_bytes(content)
    assert main(["init", str(tmp_path / "t.py"), "--kind=table", f"--data={path}"]) == 2
    assert "The data file is damaged: " in capsys.readouterr().err


def test_an_array_of_objects(tmp_path, capsys):
    path = tmp_path / "a.npz"
    np.savez(path, x=np.zeros((9, 2)), y=np.array([{}] * 9))
    assert main(["init", str(tmp_path / "t.py"), "--kind=table", f"--data={path}"]) == 2
    error = capsys.readouterr().err
    assert "with objects in y. Convert it, for example with y.astype('float32')" in error
    assert "allow_pickle" not in error


def test_excels_mark_is_no_part_of_the_first_name(data_files, capsys):
    path, rows = data_files / "mine.py", data_files / "rows.csv"
    rows.write_bytes(b"\xef\xbb\xbf" + rows.read_bytes())
    assert main(["init", str(path), "--kind=table", f"--data={rows}"]) == 0
    assert 'NUMBERS = ["id", "first", "second"]' in path.read_text()
    (x, _), _ = load_task(str(path)).load_data()
    assert x.shape == (72, 3 + 2 + 1)


def test_columns_may_have_any_name_and_hold_any_word(tmp_path):
    """Story: Keras takes no slash in a name, and calls a word that it does not know [UNK]."""
    lines = ["a/b,", "1,[UNK]", "2,x", *(f"{i},y" for i in range(8))]
    (tmp_path / "a.csv").write_text("\n".join(f"{line},{len(line)}" for line in lines) + "\n")
    path = tmp_path / "mine.py"
    assert main(["init", str(path), "--kind=table", f"--data={tmp_path / 'a.csv'}"]) == 0
    task = load_task(str(path))
    (x, _), _ = task.load_data()
    assert x.shape == (8, task.build_model().input_shape[1])


@pytest.fixture
def houses(tmp_path):
    """Prices by city and area; the note of each house is another one."""
    random = np.random.default_rng(0)
    bases = {"Bern": 150_000, "Paris": 300_000, "Rom": 100_000}
    lines = ["note,city,area,price"]
    for i in range(500):
        city, area = random.choice(list(bases)), random.uniform(30, 200)
        price = bases[city] + 900 * area + random.normal(0, 4_000)
        lines.append(f"house {i},{city},{area:.1f},{price:.0f}")
    (tmp_path / "houses.csv").write_text("\n".join(lines) + "\n")
    return tmp_path / "houses.csv"


@pytest.mark.slow
def test_a_table_of_words_and_large_numbers_is_learnt(houses, capsys):
    """Story: prices were not scaled, columns of words were left out, and no such task learnt."""
    path = houses.parent / "mine.py"
    assert main(["init", str(path), "--kind=table", f"--data={houses}"]) == 0
    said = capsys.readouterr().out
    assert "500 rows, the number price from 2 columns; left out, with more than 100" in said
    task = load_task(str(path))
    (x, y), validation = task.load_data()
    # Scaled by the rows for training alone; the words are three, and one for others.
    of_area = [i for i in range(x.shape[1]) if len(np.unique(x[:, i])) > 2]
    assert x.shape == (400, 5) and len(of_area) == 1
    assert abs(x[:, of_area].mean()) < 1e-4 < abs(validation[0][:, of_area].mean())
    keras.utils.set_random_seed(0)
    model = task.build_model()
    task.compile_model(model)
    model.fit(x, y, batch_size=32, epochs=40, verbose=0)
    _, error = model.evaluate(*validation, verbose=0)
    assert error < 0.1 * validation[1].std()


@pytest.mark.slow
def test_what_is_written_for_words_alone_trains(houses):
    path = houses.parent / "mine.py"
    text = "\n".join(line.rpartition(",")[0] for line in houses.read_text().splitlines())
    rows = [line.split(",")[1:2] * 2 for line in text.splitlines()[1:]]
    words = "\n".join(["city,same", *(",".join(row) for row in rows)])
    (houses.parent / "words.csv").write_text(words + "\n")
    flags = [f"--data={houses.parent / 'words.csv'}", "--kind=table"]
    assert main(["init", str(path), *flags]) == 0
    task = load_task(str(path))
    (x, y), _ = task.load_data()
    assert x.shape == (400, 4) and set(y) == {0, 1, 2}


def test_a_path_with_a_space_can_be_pasted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "my task.py", "--kind=table"]) == 0
    assert "tfparallel train 'my task.py' --parallel=data" in capsys.readouterr().out
    assert "tfparallel train 'my task.py' --parallel=data" in (tmp_path / "my task.py").read_text()
