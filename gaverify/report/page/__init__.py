"""The report as one HTML page that needs nothing else: no network, no font, no library."""
