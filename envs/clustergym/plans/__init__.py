"""From a recorded trace to a plan that an engine loads: planning, plan files of engines, reports, plug-ins."""
