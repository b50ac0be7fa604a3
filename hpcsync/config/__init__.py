"""The job file: tables, defaults and error messages."""
