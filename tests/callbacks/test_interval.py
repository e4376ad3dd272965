import math

import pytest

from callbacks import Interval, Progress


@pytest.mark.parametrize(
    ("text", "every", "unit", "shown"),
    [
        (500, 500, "steps", "500 steps"),
        ("1 step", 1, "steps", "1 step"),
        ("500 steps", 500, "steps", "500 steps"),
        ("1 epoch", 1, "epochs", "1 epoch"),
        ("0.25 epochs", 0.25, "epochs", "0.25 epochs"),
        ("1e9 items", 1e9, "items", "1000000000 items"),
        ("45 seconds", 45, "seconds", "45 seconds"),
        ("0.5 seconds", 0.5, "seconds", "0.5 seconds"),
        ("1 minute", 60, "seconds", "1 minute"),
        ("30 minutes", 1800, "seconds", "30 minutes"),
        ("1.5 hours", 5400, "seconds", "90 minutes"),
        ("  2   Hours ", 7200, "seconds", "2 hours"),
    ],
)
def test_parse_and_show(text, every, unit, shown):
    interval = Interval.parse(text)
    assert interval == Interval(every, unit)
    assert str(interval) == shown
    assert Interval.parse(shown) == interval
    assert Interval.parse(interval) is interval


@pytest.mark.parametrize(
    "wrong",
    [0, -1, True, "0 epochs", "-1 epochs", "nan epochs", "inf seconds", "1.5 steps", "0.5 items"],
)
def test_impossible_numbers_are_refused_with_the_number_and_an_example(wrong):
    with pytest.raises(ValueError, match=r"'0.25 epochs'") as caught:
        Interval.parse(wrong)
    assert str(wrong).split(" ")[0] in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [("1 epohc", "epochs"), ("5 min", "minutes"), ("10 sec", "seconds"), ("3 setps", "steps")],
)
def test_unknown_unit_names_the_valid_ones_and_the_nearest(wrong, nearest):
    with pytest.raises(ValueError, match=f"Did you mean '{nearest}'") as caught:
        Interval.parse(wrong)
    assert wrong in str(caught.value)
    assert "steps, epochs, items, seconds, minutes, hours" in str(caught.value)


@pytest.mark.parametrize("wrong", ["", "often", "epoch", "500", "1epoch"])
def test_text_that_is_no_number_and_unit_is_refused(wrong):
    with pytest.raises(ValueError, match="for example '500 steps'"):
        Interval.parse(wrong)


@pytest.mark.parametrize("wrong", [2.5, None, ["1 epoch"]])
def test_other_types_are_refused(wrong):
    with pytest.raises(TypeError, match=type(wrong).__name__):
        Interval.parse(wrong)


def test_unknown_unit_of_the_constructor_is_refused():
    with pytest.raises(ValueError, match="minutes"):
        Interval(1, "minutes")


def due_at(interval, points):
    """The indices of the points at which the interval is due, checked one after the other."""
    interval = Interval.parse(interval)
    pairs = zip([Progress(), *points[:-1]], points, strict=True)
    return [index for index, (before, now) in enumerate(pairs, 1) if interval.due(before, now)]


@pytest.mark.parametrize("every", [1, 3, 7])
def test_steps_are_due_at_every_multiple(every):
    points = [Progress(steps=step) for step in range(1, 30)]
    assert due_at(every, points) == [step for step in range(1, 30) if step % every == 0]


@pytest.mark.parametrize("parts", [3, 7, 10, 49])
@pytest.mark.parametrize("sum_up", [False, True])
def test_fractional_epochs_are_due_at_the_right_batch(parts, sum_up):
    # of the epochs' 10 * parts batches every 10th one, however the fraction was rounded
    step = 1 / (10 * parts)
    counts = range(1, 10 * parts * 40 + 1)
    points, total = [], 0.0
    for count in counts:
        total += step
        points.append(Progress(epochs=total if sum_up else count * step))
    assert due_at(f"{1 / parts} epochs", points) == [c for c in counts if c % 10 == 0]


def test_epochs_of_unknown_length_are_due_when_they_end():
    points = [Progress(epochs=float(epoch)) for epoch in (0, 0, 1, 1, 1, 2)]
    assert due_at("0.25 epochs", points) == [3, 6]
    assert due_at("2 epochs", points) == [6]


def test_items_are_due_when_a_multiple_was_passed():
    points = [Progress(items=items) for items in (300.0, 999.0, 1001.0, 1900.0, 2000.0, 5500.0)]
    assert due_at("1000 items", points) == [3, 5, 6]


def test_clock_is_due_once_however_many_multiples_passed():
    interval = Interval.parse("1 minute")
    acted = Progress(seconds=61.0)
    assert not interval.due(acted, Progress(seconds=119.9))
    assert interval.due(acted, Progress(seconds=120.0))
    assert interval.due(acted, Progress(seconds=1000.0))
    assert not interval.due(Progress(seconds=1000.0), Progress(seconds=1000.0))


def test_other_units_do_not_count():
    now = Progress(steps=10**6, epochs=0.5, items=math.inf, seconds=1e6)
    assert not Interval.parse("1 epoch").due(Progress(), now)


@pytest.mark.parametrize(
    ("text", "due"),
    [
        ("3 batches of each epoch", [3, 6, 10, 13]),
        ("0.5 epochs of each epoch", [3, 6, 10, 13]),  # 3 of 7 batches: rounded down
        ("4 batches of every 2 epochs", [11]),
        ("0.1 epochs of every 2 epochs", [8, 9, 10, 11, 12, 13, 14]),
    ],
)
def test_what_is_counted_in_an_epoch_begins_anew_in_the_next(text, due):
    points = [
        Progress(steps=7 * epoch + batch, epoch=epoch, batch=batch, batches=7)
        for epoch in range(2)
        for batch in range(1, 8)
    ]
    assert due_at(text, points) == due
    assert Interval.parse(str(Interval.parse(text))) == Interval.parse(text)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("3 batches", "100 batches of each epoch"),
        ("3 steps of each epoch", "got steps"),
        ("3 batches of the epoch", "ends in 'of each epoch'"),
        ("0.5 batches of each epoch", "must be a whole number"),
    ],
)
def test_what_cannot_be_counted_in_an_epoch_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Interval.parse(wrong)
