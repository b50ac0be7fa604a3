"""Protocols on windows and messages, as tests/mpi shows them, where other ranks run in the middle of every copy."""

from tests.mpi.transport.test_messages import test_every_record_arrives_once_and_in_its_senders_order  # noqa: F401
from tests.mpi.transport.test_pair_exchange import (  # noqa: F401
    test_both_ranks_have_the_mean_to_the_bit,
    test_no_average_is_lost_or_torn_and_the_sum_is_kept,
)
from tests.mpi.transport.test_published_replica import (  # noqa: F401
    test_all_ranks_read_all_ranks,
    test_no_read_is_mixed_and_serial_numbers_never_go_back,
    test_reads_are_mixed_when_the_current_row_is_filled,
)
from tests.mpi.transport.test_push_inbox import (  # noqa: F401
    test_collect_returns_all_earlier_vectors,
    test_more_vectors_than_slots_all_arrive,
    test_nothing_is_lost_and_nothing_is_counted_twice,
)
from tests.mpi.transport.test_torn_reads import (  # noqa: F401
    test_a_version_copied_over_one_that_is_read_tears_it,
    test_no_read_is_torn,
    test_no_read_is_torn_with_fewer_buffers_than_readers,
    test_without_the_protection_reads_are_torn,
    two_buffers,
)
