"""Problems with known truth, to measure cost and calibration on."""
