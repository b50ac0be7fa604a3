"""Real ranks: sessions, records of rank 0, collectives, windows and messages."""
