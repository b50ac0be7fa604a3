"""Local ranks as real launchers set them."""

from mpi4py import MPI

from hpcsync.system import rank_environment


def test_ranks_of_a_node_are_numbered_as_mpi_numbers_them(comm: MPI.Intracomm) -> None:
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    try:
        assert rank_environment.local_rank() == node.rank
        assert (rank_environment.expected_rank(), rank_environment.expected_size()) == (comm.rank, comm.size)
    finally:
        node.Free()
