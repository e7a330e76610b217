"""The report of one run: what it reached, what it cost in privacy, and what a reviewer can sign."""
