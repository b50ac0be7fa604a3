"""Parameter-server runs: sessions of servers and workers, and the messages between them."""
