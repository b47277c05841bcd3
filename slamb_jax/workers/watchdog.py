"""Ends a process whose fellow workers are gone, instead of waiting for ever."""

import contextlib
import json
import math
import os
import re
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, Self

import jax

from slamb_jax._core.checks import check_integer, check_range

EXIT_STATUS = 75  # EX_TEMPFAIL: start again, from the last checkpoint
STOPPED_STATUS = 143  # of all processes: they stopped at one step, by SIGTERM
_PREFIX = "slamb_jax/watchdog/"
_COORDINATOR = "process 0, which coordinates the others"
_DIED = "it died or was stopped"


def _coordination_client() -> Any:
    """The client of jax's coordination service, which has no public name."""
    try:
        from jax._src import distributed

        client: Any = distributed.global_state.client
        _ = client.key_value_set, client.key_value_dir_get
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"slamb_jax.Watchdog found no coordination client in jax {jax.__version__} "
            f"({error}), jax._src.distributed.global_state.client: call "
            "jax.distributed.initialize before, or run without the watchdog"
        ) from error
    return client


class Watchdog:
    """Ends this process if another worker's dies, stops or hangs, and says which.

    Inside ``with Watchdog(timeout)`` each process writes a heartbeat to jax's
    coordination service and reads the others'. If one is missing, it names the process
    on standard error and ends its own with exit status 75, within twice ``timeout``: a
    launcher then starts all again from the last checkpoint (:class:`Checkpoints`). If
    process 0 dies, which runs the service, jax itself ends the others (SIGABRT). After
    an error inside the ``with`` (not ``sys.exit(143)``, which all call after SIGTERM)
    the others end at once; after one that jax raised from a collective, the process
    first waits to learn who is gone.

    Args:
      timeout: seconds without a heartbeat after which a process counts as gone;
        positive. Set it above the longest pause of a machine.
      step_timeout: seconds from one :meth:`beat` to the next after which a process that
        is behind the others, and still has a heartbeat, counts as hung: above the
        longest step, with its evaluation and saving. The first step, which compiles,
        is not timed. None: hangs are not looked for.

    Raises:
      ValueError: for values out of range.
      RuntimeError: with several processes, if jax's coordination client is not found.

    Examples:
      >>> import slamb_jax
      >>> with slamb_jax.Watchdog(timeout=30) as watchdog:
      ...     for step in range(3):
      ...         watchdog.beat(step)  # before the step is run
    """

    def __init__(self, timeout: float, *, step_timeout: float | None = None):
        self._step_timeout = math.inf if step_timeout is None else step_timeout
        check_range("timeout", timeout, 0.0, open_low=True, open_high=True)
        check_range("step_timeout", self._step_timeout, 0.0, open_low=True)
        self._timeout = timeout
        self._me, self._all = jax.process_index(), jax.process_count()
        self._client: Any = _coordination_client() if self._all > 1 else None
        self._step, self._beats, self._state = -1, 0, "runs"
        self._seen: dict[int, tuple[dict[str, Any], float]]  # signs, and when
        self._stop, self._asking = threading.Event(), ThreadPoolExecutor(1)
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def beat(self, step: int) -> None:
        """Records that ``step``, an integer, begins; cheap, to call before each."""
        check_integer("step", step)
        self._step, self._beats, self._beaten = step, self._beats + 1, time.monotonic()

    def __enter__(self) -> Self:
        self._beaten = time.monotonic()
        unseen = {"state": "is to come", "step": -1}, self._beaten
        self._seen = dict.fromkeys(range(self._all), unseen)
        if self._client:
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if self._client is None:
            return
        if isinstance(error, SystemExit) and error.code in (None, 0, STOPPED_STATUS):
            error = None  # it ended as it meant to
        if _from_exchange(error):
            # Most likely the other end of a link is gone: learn which.
            traceback.print_exception(error)
            self._stop.wait(2 * self._timeout)  # the most that silence takes to tell
        self._state = "is done" if error is None else f"failed: {error!r}"[:500]
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(self._timeout / 5)
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # nobody is there
            self._write()

    def _watch(self) -> None:
        """Looks at the other processes until there is a reason to end this one."""
        while not self._stop.wait(self._timeout / 5):
            try:
                if reason := self._look():
                    self._give_up(reason)
            except Exception:  # a watchdog that has stopped guards nobody
                traceback.print_exc()

    def _look(self) -> str:
        """The reason to end this process, if any."""
        try:  # in a thread of its own: a coordinator that has stopped never answers
            verdict = self._asking.submit(self._write_and_read).result(self._timeout)
        except jax.errors.JaxRuntimeError as error:
            return f"{_COORDINATOR}, is gone ({error})"[:400]
        except TimeoutError:
            return f"{_COORDINATOR}, has given no answer for {self._timeout} s: {_DIED}"
        return verdict or self._lost() or self._hung()

    def _set(self, key: object, value: str) -> None:
        self._client.key_value_set(f"{_PREFIX}{key}", value, allow_overwrite=True)

    def _write(self) -> None:
        now = time.monotonic()  # the others look for a change
        # The first step, which compiles, is not timed.
        idle = now - self._beaten if self._beats > 1 else 0.0
        sign = {"now": now, "step": self._step, "idle": idle, "state": self._state}
        self._set(self._me, json.dumps(sign))

    def _write_and_read(self) -> str:
        """Tells that this process lives, and returns what another one gave up for."""
        self._write()
        pairs = self._client.key_value_dir_get(_PREFIX)
        signs = {key.rsplit("/", 1)[1]: value for key, value in pairs}
        verdict: str = signs.pop("verdict", "")
        for index, sign in ((int(k), json.loads(v)) for k, v in signs.items()):
            if self._seen[index][0] != sign:
                self._seen[index] = sign, time.monotonic()
        return verdict

    def _lost(self) -> str:
        """The reason to end because another process failed or is gone, if any."""
        for index in set(range(self._all)) - {self._me}:
            sign, seen = self._seen[index]
            silent = time.monotonic() - seen
            state, at = sign["state"], f"(last at step {sign['step']})"
            if state.startswith("failed"):
                return f"process {index} {state} {at}"
            if silent > self._timeout and state != "is done":
                gave = f"has given no sign of life for {silent:.1f} s"
                return f"process {index} {gave} {at}: {_DIED}"
        return ""

    def _hung(self) -> str:
        """The reason to end because a process takes too long for a step, if any."""
        seen = self._seen.items()
        running = {i: sign for i, (sign, _) in seen if sign["state"] == "runs"}
        first = min((sign["step"] for sign in running.values()), default=0)
        behind = sorted(i for i, sign in running.items() if sign["step"] == first)
        idle = min((running[i]["idle"] for i in behind), default=0.0)
        if idle <= self._step_timeout:
            return ""
        at = f"been at step {first} for {idle:.1f} s"
        if len(behind) == self._all:
            return f"all processes have {at}"
        return f"process {str(behind)[1:-1]} has {at}, behind the others: it hangs"

    def _give_up(self, reason: str) -> NoReturn:
        me = f"Process {self._me}, at step {self._step}, ends with exit status"
        said = f"{reason}. {me} {EXIT_STATUS}: start all again from the last checkpoint"
        print(f"slamb_jax.Watchdog: {said}", file=sys.stderr, flush=True)
        with contextlib.suppress(jax.errors.JaxRuntimeError, TimeoutError):
            told = self._asking.submit(self._set, "verdict", reason)
            told.result(self._timeout / 5)
        if self._me == 0:  # the service ends with it: let the others read why
            time.sleep(self._timeout / 2)
        os._exit(EXIT_STATUS)


def _from_exchange(error: BaseException | None) -> bool:
    """Whether jax's runtime raised it, or what it came of, as a save that broke off."""
    while error is not None:
        # Some links' errors are plain ValueErrors.
        status = isinstance(error, ValueError) and re.match(r"[A-Z_]+: ", str(error))
        if isinstance(error, jax.errors.JaxRuntimeError) or status:
            return True
        error = error.__cause__ or error.__context__
    return False
