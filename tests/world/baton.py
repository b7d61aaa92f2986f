"""A real thread that runs only while the event loop waits for it: two threads, one baton, no race.

What runs in it meets the conditions of a thread (no running loop, another thread id, other locals), but when
it runs is decided by the loop alone.
"""

import threading
from collections.abc import Callable


class WorldEnds(BaseException):
    """Raised in a paused thread to end it; not an Exception, so the code under test lets it through."""


class BatonThread:
    """Starts paused. `idle`: it had nothing to do when it paused, and has nothing until it is `awake`.
    `asleep`: it is not to be switched to. `abandoned`: nobody waits for its end."""

    blocked_after_s = 60.0  # real seconds: nothing in this world takes so long

    def __init__(self, name: str, main: Callable[[], None], awake: Callable[[], bool]) -> None:
        self.name = name
        self.awake = awake
        self.idle = False
        self.asleep = False
        self.ended = False
        self.abandoned = False
        self._main = main
        self._ending = False
        self._error: BaseException | None = None
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def switch(self) -> None:
        """Let the thread run until it pauses or ends. Raises what it raised."""
        self._go.release()
        if not self._back.acquire(timeout=self.blocked_after_s):
            self.ended = True
            raise RuntimeError(f"thread {self.name} blocks on something that is not of this world")
        if self._error is not None:
            raise self._error

    def pause(self) -> None:
        """Give the baton back until the next switch; called in the thread."""
        self._back.release()
        self._go.acquire()
        if self._ending:
            raise WorldEnds

    def end(self) -> None:
        """End the thread where it stands."""
        if not self.ended:
            self._ending = True
            self.switch()
            self._thread.join()

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self._ending:
                self._main()
        except WorldEnds:
            pass
        except BaseException as error:  # noqa: BLE001  raised again in the loop's thread by `switch`
            self._error = error
        finally:
            self.ended = True
            self._back.release()
