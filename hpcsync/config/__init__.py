"""The job file: tables, defaults and messages for mistakes."""
