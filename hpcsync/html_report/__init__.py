"""Report of runs as one HTML file, without JavaScript and without anything to load."""
