"""Checkpoints: whole or found out, resized, refused where they do not fit."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slamb_jax
from slamb_jax.checkpoint import store as _checkpoint_store
from slamb_jax.advisor import cli as _cli
from tests.workers import AXIS, mesh_of, random_tree, stack

N = 4
SHAPES = {"w": (12, 16), "b": (16,), "scale": ()}


def a_state(n=N, seed=0, mesh=None):
    """Replicas that drifted apart; on a mesh, or on one device."""
    tx = slamb_jax.slamb(0.01, axis_name=AXIS, min_size=20, mu_dtype="bfloat16")
    params = random_tree(SHAPES, seed, n)
    state = {
        "params": params,
        "opt": jax.vmap(tx.init)(params),
        "key": stack(jax.random.key(seed), n),
        "legacy": stack(jnp.arange(2, dtype=jnp.uint32), n),
    }
    moments = state["opt"][0]
    mu = jax.tree.map(lambda p: (0.1 * p).astype(jnp.bfloat16), params)
    moments = moments._replace(mu=mu, nu=jax.tree.map(jnp.square, params))
    state["opt"] = (moments, *state["opt"][1:])
    if mesh is None:
        return state
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(AXIS))
    return jax.device_put(state, spread)


def bits_of(x):
    return np.asarray(jax.random.key_data(x) if "key" in str(x.dtype) else x)


def same_bits(got, want):
    def check(a, b):
        assert bits_of(a).dtype == bits_of(b).dtype
        assert bits_of(a).tobytes() == bits_of(b).tobytes()

    jax.tree.map(check, got, want)


@pytest.mark.parametrize("on_mesh", [True, False])
def test_what_comes_back_is_what_was_saved(on_mesh, tmp_path):
    mesh = mesh_of(N) if on_mesh else None
    state = a_state(mesh=mesh)
    rng = np.random.default_rng(5)
    extra = {"position": 640, "generator": rng.bit_generator.state}
    with slamb_jax.Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore(state) is None
        for step in (3, 6, 9):
            checkpoints.save(step, state, extra)
    other = a_state(seed=1, mesh=mesh)
    with slamb_jax.Checkpoints(tmp_path) as checkpoints:
        found = checkpoints.restore(other)
    assert (found.step, found.extra) == (9, extra)
    same_bits(found.state, state)
    for x, like in zip(*map(jax.tree.leaves, (found.state, other)), strict=True):
        assert x.sharding.is_equivalent_to(like.sharding, x.ndim)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["6", "9"]
    assert not [p for p in tmp_path.rglob("*") if p.suffix in (".pkl", ".pickle")]


def data(directory):
    return [f for f in (directory / "state").rglob("d/*") if f.is_file()]


def flip(directory):
    for file in data(directory):
        raw = bytearray(file.read_bytes())
        raw[len(raw) // 2] ^= 0x10
        file.write_bytes(bytes(raw))


def truncate(directory):
    for file in data(directory):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def remove(directory):
    shutil.rmtree(directory / "state")


def lie(directory):
    """The arrays are sound, but they are not those that were saved."""
    file = directory / "about" / "metadata"
    about = json.loads(file.read_text())
    about["leaves"]["['params']['w']"]["checksums"][2][0] ^= 1
    file.write_text(json.dumps(about))


def garble(directory):
    (directory / "about" / "metadata").write_text("{")


def blank(directory):
    (directory / "about" / "metadata").write_text("null")


# TensorStore's other reads may end after Orbax has closed its loop on the first error.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", [flip, truncate, remove, lie, garble, blank])
def test_a_damaged_checkpoint_is_found_out(damage, tmp_path):
    state, later = a_state(mesh=mesh_of(N)), a_state(seed=1, mesh=mesh_of(N))
    with slamb_jax.Checkpoints(tmp_path / "sound") as checkpoints:
        checkpoints.save(1, state)
        checkpoints.save(2, later)
    # What this process wrote it may remember: read it from where it was not.
    copy = shutil.copytree(tmp_path / "sound", tmp_path / "copy")
    damage(copy / "2")
    with slamb_jax.Checkpoints(copy) as checkpoints:
        with pytest.warns(UserWarning, match=r"2 is damaged \(.*going back to the one"):
            found = checkpoints.restore(state)
        assert found.step == 1
        same_bits(found.state, state)
        checkpoints.save(2, later)  # what the damaged one should have been
        assert checkpoints.restore(state).step == 2


def test_several_that_cannot_be_read_are_kept(tmp_path):
    """One is an interrupted save; two are something else, and not to be replaced."""
    state = a_state(mesh=mesh_of(N))
    with slamb_jax.Checkpoints(tmp_path / "sound") as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state)
    copy = shutil.copytree(tmp_path / "sound", tmp_path / "copy")
    for step in "12":
        lie(copy / step)
    with slamb_jax.Checkpoints(copy) as checkpoints:
        with (
            pytest.warns(UserWarning, match="damaged"),
            pytest.raises(ValueError, match=r"no checkpoint in .* \(2: the checksum"),
        ):
            checkpoints.restore(state)
        checkpoints.save(3, state)
        assert (copy / "2").is_dir()  # of three the latest two are kept


@pytest.mark.parametrize("failure", [MemoryError("no more"), PermissionError(13, "no")])
def test_where_it_is_not_the_file_that_fails_it_is_kept(failure, tmp_path, monkeypatch):
    state = a_state()

    def fails(*_):
        raise failure

    with slamb_jax.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        with monkeypatch.context() as patch:
            patch.setattr(_checkpoint_store.Store, "read", fails)
            with pytest.raises(OSError, match=r"1 could not be read \(.*no.*is kept"):
                checkpoints.restore(state)
        checkpoints.save(2, state)
        assert (tmp_path / "1").is_dir()


def test_checkpoints_of_something_else_are_kept(tmp_path):
    import orbax.checkpoint as ocp

    state = a_state()
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(5, args=ocp.args.StandardSave({"w": np.ones(3)}))
    with slamb_jax.Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ValueError, match=r"5 could .* not one of slamb_jax"):
            checkpoints.restore(state)
        with pytest.raises(ValueError, match="step must be larger than the last, 5"):
            checkpoints.save(4, state)
    assert (tmp_path / "5").is_dir()


def test_the_command_in_the_error_resizes(tmp_path):
    state, fewer = a_state(), a_state(2)
    with slamb_jax.Checkpoints(tmp_path / "in") as checkpoints:
        checkpoints.save(1, state)
        with pytest.raises(ValueError, match="expected 2") as told:
            checkpoints.restore(fewer)
    command = str(told.value).rsplit(": slamb-jax ", 1)[1]
    _cli.main(command.replace("OUT", str(tmp_path / "out")).split())
    with slamb_jax.Checkpoints(tmp_path / "out") as checkpoints:
        same_bits(checkpoints.restore(fewer).state, slamb_jax.resize(state, 2))


def test_a_save_that_was_cut_short_is_told(tmp_path):
    state = a_state()
    with slamb_jax.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.save(2, state)
    os.rename(tmp_path / "2", tmp_path / "2.orbax-checkpoint-tmp")
    with pytest.warns(UserWarning, match="2.orbax-checkpoint-tmp was cut short"):
        checkpoints = slamb_jax.Checkpoints(tmp_path)
    with checkpoints:
        assert checkpoints.restore(state).step == 1
        checkpoints.save(2, state)
    with slamb_jax.Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore(state).step == 2


def test_what_is_saved_in_the_background_is_what_was_there(tmp_path):
    state = {"w": jax.random.normal(jax.random.key(0), (4, 50_000))}
    add = jax.jit(lambda s: {"w": s["w"] + 1}, donate_argnums=0)
    with slamb_jax.Checkpoints(tmp_path, asynchronous=True) as checkpoints:
        want = np.array(state["w"])
        checkpoints.save(1, state)
        for _ in range(5):
            state = add(state)
    with slamb_jax.Checkpoints(tmp_path) as checkpoints:
        np.testing.assert_array_equal(checkpoints.restore(state).state["w"], want)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 900 KiB, where one may be mounted."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=900k", "none", tmp_path]
    if shutil.which("mount") is None or subprocess.run(mount, check=False).returncode:
        pytest.skip("may not mount a file system here")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_is_told_and_loses_nothing(small_disk, asynchronous):
    def state(step):  # random: it does not compress
        key = jax.random.key(step)
        return {"w": jax.random.normal(key, (4, 20_000))}

    settings = {"asynchronous": asynchronous}
    checkpoints = slamb_jax.Checkpoints(small_disk / "run", **settings)

    def save(step):
        checkpoints.save(step, state(step))
        checkpoints.wait()

    save(1)
    save(2)
    with pytest.raises(OSError, match=r"could not be written into .*space.* one is 2"):
        save(3)
    checkpoints.close()
    with (
        pytest.warns(UserWarning, match="3.* was cut short"),
        slamb_jax.Checkpoints(small_disk / "run") as checkpoints,
    ):
        found = checkpoints.restore(state(0))
    assert found.step == 2
    np.testing.assert_array_equal(found.state["w"], state(2)["w"])


def test_the_compact_form_and_what_it_loses(tmp_path):
    """At an averaging step p is the same on all workers, but for rounding."""
    params = random_tree({"w": (300, 400)}, 0, 1)["w"]
    noise = 1e-7 * random_tree({"w": (300, 400)}, 1, N)["w"]
    state = {"p": params + noise, "m": random_tree({"w": (300, 400)}, 2, N)["w"]}
    state["v"] = jnp.square(state["m"])
    with slamb_jax.Checkpoints(tmp_path, keep=3) as checkpoints:
        exact = checkpoints.save(1, state)
        compact = checkpoints.save(2, state, rtol=1e-5)
        found = checkpoints.restore(state)
    leaf = params.nbytes  # of one replica
    assert exact == pytest.approx(3 * N * leaf, rel=0.15)  # float32 packs by a tenth
    assert compact == pytest.approx((2 * N + 1) * leaf, rel=0.15)
    assert compact < 0.8 * exact
    same_bits([found.state["m"], found.state["v"]], [state["m"], state["v"]])
    slamb_jax.assert_replicas_agree(found.state["p"])
    off = np.linalg.norm(found.state["p"] - state["p"])
    assert 0 < off <= 1e-5 * np.linalg.norm(state["p"])


def other_states():
    state = a_state()
    yield {k: v for k, v in state.items() if k != "key"}, r"\['key'\] is not expected"
    yield state | {"ema": state["params"]}, r"\['ema'\]\['b'\] is missing"
    yield a_state(2), r"is of 4 workers, expected 2: slamb-jax resize .* --workers 2"
    wider = state | {"legacy": jnp.zeros((N, 3), jnp.uint32)}
    yield wider, r"\['legacy'\] has shape \[2\], expected \[3\]"
    floats = state | {"legacy": jnp.zeros((N, 2), jnp.float32)}
    yield floats, r"\['legacy'\] has dtype uint32, expected float32"
    adam = state | {"opt": jax.vmap(optax.adam(0.1).init)(state["params"])}
    yield adam, r"does not fit: \['opt'\]\[0\].* and \d+ more|\['opt'\]\[0\].*missing"


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path):
    with slamb_jax.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, a_state())
        for like, message in other_states():
            with pytest.raises(ValueError, match=message):
                checkpoints.restore(like)
        about = tmp_path / "1" / "about" / "metadata"
        later = about.read_text().replace('"format": 1', '"format": 99')
        about.write_text(later)
        with pytest.raises(ValueError, match=r"has format 99, and .* reads 1"):
            checkpoints.restore(a_state())


@pytest.mark.parametrize(
    ("n", "m"), [(4, 2), (2, 8), (8, 1), (1, 4), (4, 3), (3, 5), (6, 4)]
)
def test_resizing_keeps_the_means(n, m):
    state = a_state(n)
    out = slamb_jax.resize(state, m)
    assert jax.tree.structure(out) == jax.tree.structure(state)
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(out), strict=True
    ):
        assert y.shape == (m, *x.shape[1:])
        assert y.dtype == x.dtype
        a, b = bits_of(x), bits_of(y)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            np.testing.assert_array_equal(a[[0] * m], b, err_msg=str(path))
            continue
        wide = [np.asarray(z, np.float64).mean(0) for z in (a, b)]
        scale = np.abs(np.asarray(a, np.float64)).max()
        rounding = float(jnp.finfo(x.dtype).eps) * scale
        np.testing.assert_allclose(*wide, atol=rounding)
        if m % n == 0:  # copies
            same_bits(jnp.asarray(y), jnp.repeat(x, m // n, axis=0))


def test_resizing_refuses_what_it_cannot_join():
    with pytest.raises(
        ValueError, match=r"state\['t'\] must be the same on all .*\[1, 2"
    ):
        slamb_jax.resize({"t": jnp.array([1, 2, 2])}, 2)
    with pytest.raises(ValueError, match=r"workers must be an integer .* got 0"):
        slamb_jax.resize({"t": jnp.ones(3)}, 0)
    with pytest.raises(ValueError, match=r"state\['u'\] must have a leading axis"):
        slamb_jax.resize({"t": jnp.ones(3), "u": jnp.ones(())}, 2)


@pytest.mark.parametrize(("n", "m"), [(4, 2), (2, 8), (8, 1)])
def test_the_command_resizes_a_checkpoint(n, m, tmp_path, capsys):
    state = a_state(n)
    with slamb_jax.Checkpoints(tmp_path / "old") as checkpoints:
        checkpoints.save(7, state, {"position": 99})
    _cli.main(
        ["resize", str(tmp_path / "old"), str(tmp_path / "new"), "--workers", str(m)]
    )
    assert re.search(
        rf"7: step 7, {n} workers to {m}, 16 leaves", capsys.readouterr().out
    )
    with slamb_jax.Checkpoints(tmp_path / "new") as checkpoints:
        found = checkpoints.restore(a_state(m, seed=3))
    assert (found.step, found.extra) == (7, {"position": 99})
    same_bits(found.state, slamb_jax.resize(state, m))


def test_training_goes_on_after_a_resize():
    """4 -> 2 on a mesh: state, counts and schedule carry on, and the loss falls."""
    tx = slamb_jax.slamb(0.05, axis_name=AXIS, min_size=4, sync_every=3)
    target = jnp.arange(12.0).reshape(4, 3)

    def step(state, batch):
        params, opt_state = state
        loss = lambda p: jnp.mean((batch @ p - batch @ target) ** 2)  # noqa: E731
        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    params = jnp.ones((4, 3))
    state = slamb_jax.replicate((params, tx.init(params)), mesh_of(4), AXIS)
    losses, rng = [], np.random.default_rng(0)
    for n in (4, 2):
        run = slamb_jax.per_worker_step(step, mesh_of(n), AXIS)
        for _ in range(20):
            batch = rng.normal(size=(16, 4)).astype(np.float32)
            state, loss = run(state, batch)
            losses.append(float(loss.mean()))
        if n == 4:
            before = losses[-1]
            state = slamb_jax.resize(state, 2)
    assert losses[20] < 1.5 * before
    assert losses[-1] < before
    assert state[1][0].count.tolist() == [40, 40]


def test_the_package_and_the_command_do_not_need_orbax():
    code = (
        "import sys; sys.modules['orbax'] = sys.modules['orbax.checkpoint'] = None\n"
        "import slamb_jax\n"
        "try: slamb_jax.Checkpoints('.')\n"
        "except ImportError as error: print(error)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[1],
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    assert "pip install 'slamb-jax[checkpoint]'" in run.stdout
