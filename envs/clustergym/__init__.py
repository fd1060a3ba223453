"""clustergym"""

from clustergym.traces import TokenTrace
