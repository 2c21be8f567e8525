"""Cuts data into parts at random, by class or by content, and certifies how alike they are."""

from paceline.data.partition.balance import Balancer, balanced
from paceline.data.partition.base import Partition
from paceline.data.partition.certificate import Certificate, certify
from paceline.data.partition.features import Fourier, pca
from paceline.data.partition.refine import refined
from paceline.data.partition.simple import by_label, dirichlet, even, stratified
from paceline.data.partition.submodular import facility_location, feature_based, graph_cut

__all__ = [
    "Balancer",
    "Certificate",
    "Fourier",
    "Partition",
    "balanced",
    "by_label",
    "certify",
    "dirichlet",
    "even",
    "facility_location",
    "feature_based",
    "graph_cut",
    "pca",
    "refined",
    "stratified",
]
