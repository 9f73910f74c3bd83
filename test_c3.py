import pytest
from perfsuite import Case, Topology, case_params
from perfsuite import Script
from perfsuite.testing import *
