"""MPI transport: windows, messages, waiting, and failure handling between ranks."""
