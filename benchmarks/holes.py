"""What a hole costs: flows around airfoils rebuilt from few modes, with zeros inside and with filled ones.

    python benchmarks/holes.py FOLDER        # FOLDER/airfoil/openfoam.npz, as for `t1 reproduce airfoils`

Relative L2 of the DCT's lowest modes at the points outside the airfoil, mean over the flows.
"""

import argparse
from pathlib import Path

import transform_once as t1
from transform_once.studies.airfoil_flows import errors, read_flows, rebuilt

MODES = (24, 32, 48, 64, 80, 100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    flows = read_flows(parser.parse_args().folder / "airfoil" / "openfoam.npz")
    print("| modes | zeros inside | filled |\n| --- | --- | --- |")
    for modes in MODES:
        zeros = t1.idct(t1.dct(flows.fields, 2, modes), 2, flows.fields.shape[2:])
        found = (errors(fields, flows)["relative_l2"] for fields in (zeros, rebuilt(flows, modes)))
        print(f"| {modes} | " + " | ".join(f"{error:.4f}" for error in found) + " |")


if __name__ == "__main__":
    main()
