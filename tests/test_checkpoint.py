"""Checkpoints are exact or found to be damaged, and n workers are resized to m."""

import contextlib
import functools
import gc
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax.sharding import AxisType
from orbax.checkpoint import StandardCheckpointHandler

import slamb_jax
from slamb_jax.checkpoint import Checkpoints, Snapshots, resize
from tests.close import assert_same_bits
from tests.damage import DAMAGE
from tests.optimizers import random_tree, slamb
from tests.programs import found_by
from tests.shards import mesh_with
from tests.workers import AXIS, P, mesh_of, stack, train

N = 4
PACKAGE = Path(slamb_jax.__file__).parent
SHAPES = {"w": (12, 16), "b": (16,), "scale": ()}


def a_state(n=N, seed=0, mesh=None, **more):
    """Replicas that differ; on a mesh, or on one device."""
    tx, params = slamb(mu_dtype="bfloat16"), random_tree(SHAPES, seed, n)
    update = jax.jit(jax.vmap(tx.update, axis_name=AXIS))
    _, opt_state = update(params, jax.vmap(tx.init)(params), params)
    state = {
        "params": params,
        "opt": opt_state,
        "key": stack(jax.random.key(seed), n),
        "own": jax.random.split(jax.random.key(seed), n),
        "worker": jnp.arange(n),
        "empty": jnp.ones((n, 0, 3)),
        "legacy": stack(jnp.arange(2, dtype=jnp.uint32), n),
        "complex": jax.lax.complex(params["w"], params["w"][::-1]),
    } | more
    if mesh is None:
        return state
    return jax.device_put(state, jax.sharding.NamedSharding(mesh, P(AXIS)))


def assert_restored(found, step, state, like=None, extra=None):
    """To the bit, and placed as what it was asked to be like."""
    assert found.step == step
    assert extra is None or found.extra == extra
    assert_same_bits(found.state, state)
    for x, y in zip(*map(jax.tree.leaves, (found.state, like or state)), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)


FEW_BITS = "int2", "int4", "float4_e2m1fn", "float8_e4m3fn", "float8_e5m2"


IN_BACKGROUND = functools.partial(Checkpoints, asynchronous=True)


@pytest.mark.parametrize("kind", [None, AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("store", [Checkpoints, IN_BACKGROUND, Snapshots])
def test_what_comes_back_is_what_was_saved(store, kind, tmp_path):
    """Of every dtype; the latest two are kept."""
    mesh = kind and mesh_with({AXIS: N}, kind)
    few = jnp.arange(12.0).reshape(N, 3) % 2  # which all of them hold
    state, want, other = (
        a_state(N, i, mesh, **{x: few.astype(getattr(jnp, x)) for x in FEW_BITS})
        for i in (0, 0, 1)
    )
    rng = np.random.default_rng(5)
    extra = {"position": 640, "generator": rng.bit_generator.state}
    opened = contextlib.nullcontext if store is Snapshots else (lambda x: x)
    with opened(store(tmp_path)) as kept:
        assert kept.restore(state) is None
        for step in (3, 6, 9):
            kept.save(step, state, extra)
        jax.tree.map(lambda x: x.delete(), state)  # as a step that it is donated to
    with opened(store(tmp_path)) as kept:
        assert_restored(kept.restore(other), 9, want, other, extra)
    names = {path.name.removesuffix(".snapshot") for path in tmp_path.iterdir()}
    assert {name for name in names if name.isdigit()} == {"6", "9"}
    assert not [p for p in tmp_path.rglob("*") if p.suffix in (".pkl", ".pickle")]


@pytest.mark.parametrize("store", [Checkpoints, Snapshots])
@pytest.mark.parametrize("dtype", ["int64", "uint64", "float64", "complex128"])
def test_what_jax_would_cut_is_refused(store, dtype, tmp_path):
    """2^33 + 5 came back as 5."""
    kept, state = store(tmp_path), {"seen": np.full(N, 2**33 + 5, dtype)}
    said = rf"state\['seen'\] must have a dtype that jax holds, got {dtype}: "
    assert kept.restore(a_state()) is None
    with pytest.raises(ValueError, match=said):
        kept.save(1, state)
    kept.save(1, jax.tree.map(jnp.asarray, state))
    del kept
    with pytest.raises(ValueError, match=said):
        store(tmp_path).restore(state)


@pytest.mark.parametrize("store", [Checkpoints, Snapshots])
def test_what_is_equal_on_all_workers_is_stored_once(store, tmp_path):
    """Under the default exchange that is all but the momentum."""
    tx, params = slamb_jax.adamw(0.1, slamb_jax.Exchange(AXIS)), random_tree(SHAPES, 0)
    grads = [random_tree(SHAPES, 1 + t, N) for t in range(3)]
    state, kept = train(tx, params, grads, "vmap")[-1], store(tmp_path)
    assert kept.restore(state) is None
    scalars = 3 + len(params)  # counts, and the mean of each leaf's v
    elements = sum(x.size for x in jax.tree.leaves(params))
    assert kept.save(3, state) <= 4 * ((2 + N) * elements + scalars)


@pytest.fixture(scope="module")
def states():
    return {t: a_state(seed=t, mesh=mesh_of(N)) for t in (1, 2)}


@pytest.fixture(scope="module")
def sound(states, tmp_path_factory):
    """Two checkpoints, to be copied: Orbax may remember those that it wrote."""
    directory = tmp_path_factory.mktemp("sound")
    with Checkpoints(directory) as checkpoints:
        for t, state in states.items():
            checkpoints.save(t, state, {"position": 1120})
    return directory


@pytest.fixture
def copy(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / "copy")


@pytest.fixture
def copied(copy):
    with Checkpoints(copy) as checkpoints:
        yield checkpoints


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_is_found_out(damage, states, copy, copied):
    damage(copy / "2")
    before = {x.name for x in (copy / "2").iterdir()}
    with pytest.warns(UserWarning, match=r"2 is damaged \(.*going back to the one"):
        assert_restored(copied.restore(states[2]), 1, states[1])
    copied.save(2, states[2])  # what the damaged one should have been
    assert copied.restore(states[1]).step == 2
    (aside,) = copy.glob("2.unread-*")
    assert {x.name for x in aside.iterdir()} == before


def test_an_earlier_step_is_read_by_its_number(states, copy, copied):
    assert_restored(copied.restore(states[2], step=1), 1, states[1])
    with pytest.raises(ValueError, match=r"step must be one of \[1, 2\], got 3"):
        copied.restore(states[2], step=3)
    DAMAGE["flip"](copy / "1")
    with pytest.raises(ValueError, match=r"copy/1 is damaged"):
        copied.restore(states[2], step=1)


@pytest.mark.parametrize("steps", ["2", "12"])
def test_where_none_is_sound_all_are_kept(steps, states, copy, copied):
    """A run that began anew would leave them behind."""
    shutil.rmtree(copy / "1") if steps == "2" else DAMAGE["lie"](copy / "1")
    DAMAGE["lie"](copy / "2")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(ValueError, match=r"is damaged \(the checksum .* kept"):
            copied.restore(states[1])
    ignored = [x for x in told if "and is ignored" in str(x.message)]
    assert len(ignored) == len(steps) - 1
    copied.save(3, states[1])
    assert (copy / "2").is_dir()  # of three the latest two are kept


@pytest.mark.parametrize("failure", [MemoryError("no more"), PermissionError(13, "no")])
def test_where_the_files_are_not_to_blame_they_are_kept(failure, states, copy, copied):
    read = mock.patch.object(StandardCheckpointHandler, "restore", side_effect=failure)
    with read, pytest.raises(OSError, match=r"2 could not be read \(.*no.*is kept"):
        copied.restore(states[1])
    copied.save(3, states[1])
    assert (copy / "2").is_dir()


def test_what_is_no_checkpoint_hides_none_and_stops_no_save(states, copy):
    """One of another step, moved away then, and files where Orbax has folders."""
    shutil.copytree(copy / "2", copy / "50")
    (copy / "3.orbax-checkpoint-tmp").write_text("a file")
    (copy / "4.orbax-checkpoint-tmp").symlink_to(copy / "2")
    (copy / "9").write_text("a file")
    (copy / "07").mkdir()
    with Checkpoints(copy) as checkpoints:
        renamed = pytest.warns(
            UserWarning, match=r"50 is damaged \(the .* as step 50, "
        )
        with renamed, pytest.warns(UserWarning, match="9 is damaged"):
            assert_restored(checkpoints.restore(states[1]), 2, states[2])
        shutil.move(copy / "50", copy.with_name("aside"))
        for step in (3, 4):
            checkpoints.save(step, states[1])
        assert_restored(checkpoints.restore(states[2]), 4, states[1])
    names = {path.name.partition("-")[0] for path in copy.iterdir()}
    assert names == {"3", "4", "07", "9.unread"}


def full_of(step):
    return {"w": jnp.full((N, 2), step)}


def test_a_reader_that_stays_open_sees_what_is_saved(tmp_path):
    with Checkpoints(tmp_path) as early, Checkpoints(tmp_path) as writer:
        assert early.restore(full_of(0)) is None
        for step in range(1, 6):
            writer.save(step, full_of(step))
            assert_restored(early.restore(full_of(0)), step, full_of(step))
            assert early.latest() == step
            if step > 1:
                assert early.restore(full_of(0), step=step - 1).step == step - 1


@pytest.mark.parametrize(
    ("owner", "name"), [(Path, "read_text"), (StandardCheckpointHandler, "restore")]
)
def test_what_is_removed_while_it_is_read_is_no_damage(owner, name, tmp_path):
    """Its metadata, or its arrays."""
    with Checkpoints(tmp_path) as reader, Checkpoints(tmp_path) as writer:
        for step in (1, 2):
            writer.save(step, full_of(step))
        read, steps = getattr(owner, name), iter(range(3, 9))

        def saved_meanwhile(*args, **kwargs):
            for step in [*steps][:2]:
                writer.save(step, full_of(step))
            return read(*args, **kwargs)

        with mock.patch.object(owner, name, saved_meanwhile):
            assert_restored(reader.restore(full_of(0)), 4, full_of(4))


@pytest.mark.parametrize(
    ("was", "now"), [("ternary", "bfloat16"), (None, "ternary"), ("sign", None)]
)
def test_another_payload_is_restored_or_told(was, now, tmp_path):
    def state(payload):
        tx = slamb_jax.adamw(0.1, slamb_jax.Exchange(AXIS, payload=payload))
        params = random_tree(SHAPES, 0)
        return stack((params, tx.init(params)), N)

    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state(was))
        if was and now:
            assert_restored(checkpoints.restore(state(now)), 1, state(was))
        else:
            with pytest.raises(ValueError, match="with payload=None if they had it"):
                checkpoints.restore(state(now))


EXCHANGE = slamb_jax.Exchange(AXIS)
ALIKE = {  # whose arrays have the same names, shapes and dtypes
    "adamw": slamb_jax.adamw(0.1, EXCHANGE),
    "lion": slamb_jax.lion(0.1, EXCHANGE),
    "own": optax.chain(slamb_jax.mask_momentum(EXCHANGE), optax.sgd(0.1)),
}
TURNS = [slamb_jax.layerwise_trust_ratio, slamb_jax.elementwise_rescale]
ALIKE |= {
    "accumulated": slamb_jax.accumulate(ALIKE["adamw"], 2),
    "turns": optax.chain(*(link(EXCHANGE) for link in TURNS)),
    "turned": optax.chain(*(link(EXCHANGE) for link in TURNS[::-1])),
}


@pytest.mark.parametrize("store", [Checkpoints, Snapshots])
def test_the_state_of_another_optimizer_is_refused(store, tmp_path):
    params = random_tree(SHAPES, 0)
    states = {k: stack((params, tx.init(params)), N) for k, tx in ALIKE.items()}
    told = {}
    for name, state in states.items():
        kept = store(tmp_path / name)
        assert kept.restore(state) is None
        kept.save(1, state)
        for other in {*states} - {name}:
            with pytest.raises(ValueError, match="restore into the opt") as error:
                kept.restore(states[other])
            told[name, other] = str(error.value)
        assert_restored(kept.restore(state), 1, state)
    said = "[1][2]['lion'] is missing, expected EmptyState; [1][2]['adamw'] is not exp"
    assert said in told["adamw", "lion"]


def test_a_save_is_left_alone_while_it_lasts_and_removed_when_cut_short(states, copy):
    with Checkpoints(copy) as writer:
        writer.save(3, states[1])
        begun = shutil.copytree(copy / "3", copy / "4.orbax-checkpoint-tmp-0")
        with Checkpoints(copy) as reader:
            assert reader.restore(states[1]).step == 3
            with pytest.raises(OSError, match=r"another run is saving into .*copy"):
                reader.save(5, states[1])
        assert begun.is_dir()
    with Checkpoints(copy) as checkpoints:  # that run is over
        assert checkpoints.restore(states[1]).step == 3
        assert begun.is_dir()
        checkpoints.save(4, states[2])
        assert not begun.exists()
    with Checkpoints(copy) as checkpoints:
        assert checkpoints.restore(states[1]).step == 4


def test_a_directory_that_can_only_be_read_is_restored_from(states, copied):
    denied = dict.fromkeys(
        ("touch", "unlink", "rmdir", "rename"),
        mock.Mock(side_effect=PermissionError(13, "Permission denied")),
    )
    no_file = mock.patch("tempfile.NamedTemporaryFile", denied["touch"])
    with mock.patch.multiple(Path, **denied), no_file:
        assert copied.restore(states[1]).step == 2
        with pytest.raises(OSError, match="Permission denied"):
            copied.save(3, states[1])
    with pytest.raises(OSError, match="about/metadata"):
        Checkpoints(copied._directory / "2" / "about" / "metadata")


def test_a_run_that_is_gone_but_for_a_cycle_holds_no_directory(tmp_path):
    """As the traceback of its error may hold it, in a notebook."""
    gc.disable()
    try:
        writer = Checkpoints(tmp_path)
        writer.save(1, full_of(1))
        writer.itself = writer
        del writer
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(2, full_of(2))
    finally:
        gc.enable()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 900 KiB, where one may be mounted."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=900k", "none", tmp_path]
    if shutil.which("mount") is None or subprocess.run(mount, check=False).returncode:
        pytest.skip("may not mount a file system here")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_is_told_loses_nothing_and_may_be_emptied(small_disk, asynchronous):
    def state(step):  # random: it does not compress
        return random_tree({"w": (14_000,)}, step, 4)

    def save(step):
        checkpoints.save(step, state(step))
        checkpoints.wait()
        return {path.name for path in run.iterdir()}

    run, other = small_disk / "run", small_disk / "other"
    other.write_bytes(bytes(350_000))
    with Checkpoints(run, asynchronous=asynchronous) as checkpoints:
        save(1)
        save(2)
        for step in (3, 4, 5):
            said = r"could not be written into .*space.* one is 2"
            with pytest.raises(OSError, match=said):
                save(step)
            assert {path.name for path in run.iterdir()} == {"1", "2"}
        with Checkpoints(run) as reader:
            assert_restored(reader.restore(state(0)), 2, state(2))
        other.unlink()
        assert save(6) == {"2", "6"}
        assert save(7) == {"6", "7"}


@given(n=st.integers(1, 9), m=st.integers(1, 9), seed=st.integers(0, 99))
@example(n=4, m=2, seed=0)
@example(n=2, m=8, seed=0)
@example(n=8, m=1, seed=0)
def test_resizing_keeps_the_means(n, m, seed):
    params = random_tree({"w": (5, 3), "scale": ()}, seed, n)
    same = random_tree({"score": (9,)}, seed)
    state = {"p": params, "mu": jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)}
    state |= {"count": np.full(n, 7), "keys": np.ones((n, 2)), "same": stack(same, n)}
    out = resize(state, m)
    assert jax.tree.structure(out) == jax.tree.structure(state)
    assert_same_bits(out["same"], stack(same, m))
    for x, y in zip(*map(jax.tree.leaves, (state, out)), strict=True):
        x = np.asarray(x)
        assert (y.dtype, y.shape) == (x.dtype, (m, *x.shape[1:]))
        if m % n == 0:
            np.testing.assert_array_equal(y, np.repeat(x, m // n, axis=0))
        want, got = (z.astype(np.float64).mean(0) for z in (x, y))
        eps = jnp.finfo("float32" if x.dtype == np.float32 else "bfloat16").eps
        rounding = float(np.abs(x).max() * eps)
        np.testing.assert_allclose(got, want, atol=rounding, rtol=0)


@pytest.mark.parametrize("m", [2, 3, 4, 9])
def test_resizing_gives_each_worker_its_own_key_and_number(m):
    state = a_state()
    out = resize({k: state[k] for k in ("key", "own", "worker")}, m)
    assert out["worker"].tolist() == list(range(m))
    same, own = (jax.random.key_data(out[name]) for name in ("key", "own"))
    assert len(np.unique(own, axis=0)) == m
    np.testing.assert_array_equal(same, [jax.random.key_data(state["key"][0])] * m)


@pytest.mark.parametrize(("m", "on_mesh"), [(2, True), (8, False)])
def test_a_checkpoint_is_resized_as_a_state_is(m, on_mesh, tmp_path):
    state, like = a_state(), a_state(m, 1, mesh_of(m) if on_mesh else None)
    extra = {"position": 99}
    with Checkpoints(tmp_path / "in") as checkpoints:
        checkpoints.save(7, state, extra)
        assert_same_bits(checkpoints.restore(state, workers=N).state, state)
        found = checkpoints.restore(like, workers=m)
    assert_restored(found, 7, resize(state, m), like, extra)


PROCESSES = """
import shutil
from unittest import mock
from jax.experimental import multihost_utils

state = {"w": jnp.ones(3), "key": jax.random.key(0)}
state = slamb_jax.replicate(state, mesh, slamb_jax.Exchange("data"))
shared, own = pathlib.Path("shared"), pathlib.Path(str(index))

def attempt(name, directory, use):
    try:
        with slamb_jax.Checkpoints(directory) as checkpoints:
            found[name] = use(checkpoints)
    except (OSError, ValueError) as error:
        found[name] = type(error).__name__ + ": " + str(error)

attempt("saved", shared, lambda x: x.save(1, state))
attempt("restored", shared, lambda x: x.restore(state).step)
attempt("own", own, lambda x: x.save(1, state))
found["left"] = [path.name for path in own.iterdir()]
if index == 0:
    shutil.copytree(shared / "1", own / "1")
multihost_utils.sync_global_devices("copied")
attempt("other", own, lambda x: x.restore(state))
for name, read in (
    ("damage", lambda: [{}][index]),
    ("failure", lambda: {} if index == 0 else bytes(1 << 62)),
):
    reads = mock.Mock(side_effect=lambda *_, **__: read())
    with mock.patch("orbax.checkpoint.StandardCheckpointHandler.restore", reads):
        attempt(name, shared, lambda x: x.restore(state, step=1))
"""


@pytest.mark.long
def test_processes_share_the_directory_and_what_went_wrong(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for found in found_by(2, PROCESSES, tmp_path):
        assert found["saved"] == 4 * (3 + 4 * 2)  # one w, and four keys
        assert found["restored"] == 1
        assert found["left"] == []
        told = f"OSError: directory .* processes share, .*{tmp_path}/1: process 1"
        assert re.match(f"{told} does not see a file", found["own"])
        assert re.match("ValueError: .*1 is damaged .* are kept", found["other"])
        assert re.match(r"DamagedCheckpointError: .*\(IndexError", found["damage"])
        assert re.match(r"OSError: .*\(MemoryError.*it is kept", found["failure"])


def test_only_checkpoints_need_orbax(tmp_path, monkeypatch):
    """The package and the command line run without it."""
    for name in ("orbax", "orbax.checkpoint"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install 'slamb-jax\[checkpoint\]'"):
        Checkpoints(tmp_path)
    sources = [file.read_text() for file in PACKAGE.rglob("*.py")]
    assert not [x for x in sources if re.search(r"^(import|from) orbax", x, re.M)]
