"""Following a stream through connections that come and go, as transcripts."""

from __future__ import annotations

from holdfast.core.following import NOTHING, RETRY_MS, RETRY_MS_MAX, Following


def test_a_new_connection_goes_on_where_the_last_one_got_to() -> None:
    following = Following()
    assert following.at is None  # the oldest there is
    assert following.refuses(epoch=1, since=5) is None
    following.taken(7)
    assert following.at == 8
    following.taken(6)  # late news of what is known
    assert following.at == 8


def test_what_was_taken_is_not_taken_again() -> None:
    following = Following(at=8)
    assert [following.is_new(bucket) for bucket in (6, 7, 8)] == [False, False, True]
    assert following.repeats == 2
    assert following.is_behind(8) and not following.is_behind(7)


def test_bucket_zero_is_a_bucket() -> None:
    following = Following(at=0)
    assert following.is_new(0) and following.is_behind(0)
    assert following.refuses(epoch=1, since=1) is not None


def test_a_gap_is_refused() -> None:
    following = Following(at=8)
    assert following.refuses(epoch=1, since=9) == "bucket 9 came while 8 is still missing"
    assert following.refuses(epoch=1, since=8) is None


def test_an_instance_older_than_one_already_heard_is_not_believed() -> None:
    following = Following(at=8)
    assert following.refuses(epoch=3, since=8) is None
    refused = following.refuses(epoch=2, since=8)
    assert refused == "epoch 2 spoke after its successor of epoch 3"
    assert following.refuses(epoch=3, since=8) is None


def test_nobody_who_does_not_answer_is_asked_all_the_time() -> None:
    following = Following()
    pauses = [following.lost() for _ in range(5)]
    assert pauses == [RETRY_MS, 2 * RETRY_MS, 4 * RETRY_MS, RETRY_MS_MAX, RETRY_MS_MAX]
    following.refuses(epoch=1, since=0)  # somebody spoke
    assert following.lost() == RETRY_MS


# -- tentative buckets and replicas (Borealis section 3.5) ----------------------------------------


def test_who_wants_only_what_is_stable_takes_and_asks_for_nothing_else() -> None:
    following = Following(at=8)
    assert following.tentative_after is None
    assert not following.is_younger(8)


def test_property_2_3_a_tentative_bucket_is_taken_once_whoever_gives_it() -> None:
    """The bucket is t_max: whatever went into it has this time, or an earlier one."""
    following = Following(at=8, tentative=True)
    assert following.tentative_after == NOTHING  # everything there is
    assert following.is_younger(8)
    following.taken_tentative(10)
    assert following.tentative_after == 10
    assert [following.is_younger(bucket) for bucket in (9, 10, 11)] == [False, False, True]
    following.taken_tentative(9)  # late news
    assert following.tentative_after == 10


def test_what_is_stable_already_is_not_taken_as_tentative() -> None:
    following = Following(at=8, tentative=True)
    assert [following.is_younger(bucket) for bucket in (6, 7, 8)] == [False, False, True]
    following.taken(11)
    assert [following.is_younger(bucket) for bucket in (11, 12)] == [False, True]


def test_taking_something_tentative_is_no_progress() -> None:
    """What comes as stable is new, although it was there before."""
    following = Following(at=8, tentative=True)
    following.taken_tentative(12)
    assert following.at == 8
    assert following.is_new(8) and following.is_behind(8)
    assert following.refuses(epoch=1, since=9) is not None
    assert following.repeats == 0


def test_after_an_undo_everything_tentative_is_new() -> None:
    following = Following(at=8, tentative=True)
    following.taken_tentative(12)
    following.undone()
    assert following.tentative_after == NOTHING
    assert [following.is_younger(bucket) for bucket in (7, 8, 12)] == [False, True, True]


def test_before_the_first_bucket_everything_is_younger() -> None:
    following = Following(tentative=True)
    assert following.is_younger(-5) and following.is_younger(5)


def test_each_replica_has_epochs_of_its_own() -> None:
    """They are restarted one by one: what is old of one may be new of another."""
    following = Following(at=8)
    assert following.refuses(epoch=7, since=8, replica="a") is None
    assert following.refuses(epoch=1, since=8, replica="b") is None
    assert following.refuses(epoch=2, since=8, replica="b") is None
    assert following.refuses(epoch=1, since=8, replica="b") == (
        "epoch 1 spoke after its successor of epoch 2"
    )
    assert following.refuses(epoch=6, since=8, replica="a") == (
        "epoch 6 spoke after its successor of epoch 7"
    )
    assert following.epochs == {"a": 7, "b": 2}


def test_whoever_is_refused_is_not_remembered() -> None:
    following = Following(at=8)
    following.refuses(epoch=5, since=9, replica="a")  # a gap
    assert following.epochs == {}
