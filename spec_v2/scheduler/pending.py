"""What a launch will have made, and the step that it belongs to."""

from typing import Generic, TypeVar

T = TypeVar("T")


class Step:
    """One scheduler step, as the streams know it. `error`: the first exception of any of its launches.

    `captured`: launches go through the stream's `graphs`, as what they read and make has a fixed shape. `seq_lens`: of
    the batch's rows before the step, where a device's attention takes them from the host.
    """

    __slots__ = ("captured", "error", "index", "seq_lens")

    def __init__(self, index: int) -> None:
        self.index = index
        self.captured = False
        self.seq_lens: tuple[int, ...] = ()
        self.error: BaseException | None = None


class Pending(Generic[T]):
    """A value that a launch will have made. The host may `get` it only after an event that follows it."""

    __slots__ = ("_done", "_value", "step")

    def __init__(self, step: Step) -> None:
        self.step = step
        self._done = False
        self._value: T | None = None

    def get(self) -> T:
        """The value. Raises the step's error, or RuntimeError where the launch has not run yet."""
        if self.step.error is not None:
            raise self.step.error
        if not self._done:
            raise RuntimeError("a Pending was read before its event: wait for the event first")
        return self._value  # type: ignore[return-value]

    def set(self, value: T) -> None:
        self._value, self._done = value, True
