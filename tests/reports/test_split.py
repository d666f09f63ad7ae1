# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from fedloom.clients.partition import partition
from fedloom.core.errors import ConfigError
from fedloom.data.arrays import Arrays
from fedloom.reports.split import class_counts, picture


def arrays(classes: int = 4, samples: int = 800) -> Arrays:
    rng = np.random.default_rng(0)
    y = np.arange(samples) % classes if classes else rng.normal(size=samples).astype(np.float32)
    return Arrays("toy", rng.normal(size=(samples, 2)).astype(np.float32), y, num_classes=classes)


@pytest.mark.parametrize(("classes", "clients", "scheme"), [(4, 10, "classes:2"), (30, 200, "iid"), (0, 10, "iid")])
def test_pictures_of_all_sizes(tmp_path, classes, clients, scheme):
    data = arrays(classes)
    parts = partition(data.y, scheme, clients, 0, unseen=2)
    path = picture(parts, data, tmp_path / "split.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_counts_are_samples_by_client_and_class():
    data = arrays(classes=4, samples=40)
    parts = partition(data.y, "iid", 2, 0)
    np.testing.assert_array_equal(class_counts(parts, data), np.full((2, 4), 5))
    assert class_counts(partition(arrays(0).y, "iid", 2, 0), arrays(0)).shape == (2, 1)


def test_refuses_unknown_kinds_of_pictures(tmp_path):
    data = arrays()
    with pytest.raises(ConfigError, match=r"the name of a picture ends in one of: .*png"):
        picture(partition(data.y, "iid", 2, 0), data, tmp_path / "split.doc")
