"""Results for people: tables for the terminal, plots, and a self-contained HTML page for a plan."""
