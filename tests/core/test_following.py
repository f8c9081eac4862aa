"""Following a stream through connections that come and go, as transcripts."""

from __future__ import annotations

from holdfast.core.following import RETRY_MS, RETRY_MS_MAX, Following


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
