import asyncio
import multiprocessing
import threading
import time

import pytest

from opensearch_lightning.tools import in_thread, threads


async def test_results_and_errors_come_back():
    assert await in_thread(lambda: 3) == 3
    with pytest.raises(ValueError, match="oh"):
        await in_thread(lambda: int_of("oh"))
    with pytest.raises(RuntimeError, match="StopIteration"):
        await in_thread(lambda: next(iter(())))
    with pytest.raises(RuntimeError, match="SystemExit"):
        await in_thread(lambda: exit_now())
    assert await in_thread(lambda: 4) == 4


def int_of(text):
    raise ValueError(text)


def exit_now():
    raise SystemExit(3)


async def test_works_one_after_another_share_a_thread():
    await in_thread(threading.get_ident)
    seen = set()
    for _ in range(20):
        seen.add(await in_thread(threading.get_ident))
        await asyncio.sleep(0.01)
    assert len(seen) < 5


async def test_a_stuck_work_holds_up_no_other():
    release = threading.Event()
    stuck = [asyncio.create_task(in_thread(release.wait)) for _ in range(20)]
    await asyncio.sleep(0)
    started = time.monotonic()
    assert await in_thread(lambda: "free") == "free"
    assert time.monotonic() - started < 2
    release.set()
    await asyncio.gather(*stuck)


async def test_what_a_cancelled_work_makes_is_dropped():
    release, done = threading.Event(), threading.Event()

    def work():
        release.wait(10)
        done.set()

    waiting = asyncio.create_task(in_thread(work))
    await asyncio.sleep(0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    release.set()
    assert await in_thread(lambda: done.wait(5))


async def test_idle_threads_end(monkeypatch):
    monkeypatch.setattr(threads, "_IDLE_SECONDS", 0.05)
    thread = await in_thread(threading.current_thread)
    if thread in threads._idle:  # one that was idle before waits for its own, longer time
        await in_thread(lambda: time.sleep(0.1))
    fresh = await asyncio.gather(
        *(in_thread(lambda: (time.sleep(0.05), threading.current_thread())[1]) for _ in range(8))
    )
    for worker in fresh:
        await asyncio.to_thread(worker.join, 15)
        assert not worker.is_alive()
    assert await in_thread(lambda: 5) == 5


def work_in_child(answers):
    answers.put(asyncio.run(in_thread(lambda: "child")))


async def test_a_forked_process_has_threads_of_its_own():
    await in_thread(lambda: None)
    fork = multiprocessing.get_context("fork")
    answers = fork.Queue()
    child = fork.Process(target=work_in_child, args=(answers,))
    child.start()
    assert await asyncio.to_thread(answers.get, True, 20) == "child"
    child.join(20)
    assert child.exitcode == 0
