import pytest

pytest.register_assert_rewrite("efficient_ft.testing")
