//! The values of codes, as bitsandbytes defines them.

/// Values of the 4-bit codes of NF4: 16 quantiles of the normal distribution, scaled to [-1, 1].
/// `get_4bit_type("nf4")` in bitsandbytes.
pub const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// Factor by which an 8-bit integer and the scale of its block are multiplied: 1/127, as
/// bitsandbytes writes it.
#[allow(clippy::excessive_precision, reason = "the digits are those of bitsandbytes")]
pub const INT8_FACTOR: f32 = 7.874_015_7e-3;

/// Number of blocks whose scales share a scale, under double quantisation.
pub const SCALES: usize = 256;

/// Positive values of the 8-bit codes of scales, without 1: `create_dynamic_map()` in bitsandbytes.
#[rustfmt::skip]
const MAGNITUDES: [f32; 127] = [
    5.5000004e-7, 3.2500002e-6, 7.75e-6, 2.1249998e-5, 4.375e-5, 6.625e-5, 8.875e-5,
    0.000_156_250_01, 0.000_268_750_04, 0.000_381_250_02, 0.000_493_750_03, 0.000_606_250_1,
    0.000_718_750_06, 0.000_831_25, 0.000_943_750_1, 0.001_281_249_9, 0.001_843_75, 0.002_406_25,
    0.002_968_75, 0.003_531_249_7, 0.004_093_75, 0.004_656_249_7, 0.005_218_750_3, 0.005_781_25,
    0.006_343_75, 0.006_906_25, 0.007_468_75, 0.008_031_25, 0.008_593_75, 0.009_156_249,
    0.009_718_75, 0.011_406_25, 0.014_218_75, 0.017_031_25, 0.019_843_752, 0.022_656_25,
    0.025_468_75, 0.028_281_251, 0.031_093_75, 0.033_906_25, 0.036_718_752, 0.039_531_25,
    0.042_343_747, 0.045_156_25, 0.047_968_75, 0.050_781_25, 0.053_593_75, 0.056_406_25,
    0.059_218_753, 0.062_031_25, 0.064_843_75, 0.067_656_256, 0.070_468_746, 0.073_281_25,
    0.076_093_75, 0.078_906_25, 0.081_718_76, 0.084_531_25, 0.087_343_75, 0.090_156_25,
    0.092_968_754, 0.095_781_26, 0.098_593_75, 0.107_031_256, 0.121_093_75, 0.135_156_24,
    0.149_218_75, 0.163_281_25, 0.177_343_76, 0.191_406_25, 0.205_468_74, 0.219_531_25,
    0.233_593_75, 0.247_656_24, 0.261_718_75, 0.275_781_27, 0.289_843_74, 0.303_906_26,
    0.317_968_73, 0.332_031_25, 0.346_093_74, 0.360_156_24, 0.374_218_76, 0.388_281_23,
    0.402_343_75, 0.416_406_24, 0.430_468_74, 0.444_531_26, 0.458_593_73, 0.472_656_25, 0.486_718_7,
    0.500_781_24, 0.514_843_7, 0.528_906_2, 0.542_968_75, 0.557_031_3, 0.571_093_8, 0.585_156_26,
    0.599_218_7, 0.613_281_25, 0.627_343_8, 0.641_406_3, 0.655_468_76, 0.669_531_2, 0.683_593_75,
    0.697_656_3, 0.711_718_8, 0.725_781_26, 0.739_843_7, 0.753_906_25, 0.767_968_8, 0.782_031_24,
    0.796_093_76, 0.810_156_2, 0.824_218_75, 0.838_281_3, 0.852_343_74, 0.866_406_26, 0.880_468_7,
    0.894_531_25, 0.908_593_8, 0.922_656_24, 0.936_718_76, 0.950_781_2, 0.964_843_75, 0.978_906_3,
    0.992_968_74,
];

/// Values of the 8-bit codes of scales, in ascending order: negative ones, 0, positive ones, and 1.
pub const DYNAMIC: [f32; 256] = {
    let mut values = [0.0; 256];
    let mut at = 0;
    while at < MAGNITUDES.len() {
        values[126 - at] = -MAGNITUDES[at];
        values[128 + at] = MAGNITUDES[at];
        at += 1;
    }
    values[255] = 1.0;
    values
};

#[cfg(test)]
mod tests {
    use super::*;

    /// The texts are those of bitsandbytes 0.45, `bitsandbytes/functional.py`.
    #[test]
    fn the_values_of_nf4_are_those_of_bitsandbytes() {
        let theirs = [
            "-1.0",
            "-0.6961928009986877",
            "-0.5250730514526367",
            "-0.39491748809814453",
            "-0.28444138169288635",
            "-0.18477343022823334",
            "-0.09105003625154495",
            "0.0",
            "0.07958029955625534",
            "0.16093020141124725",
            "0.24611230194568634",
            "0.33791524171829224",
            "0.44070982933044434",
            "0.5626170039176941",
            "0.7229568362236023",
            "1.0",
        ];
        let theirs = theirs.map(|text| text.parse::<f64>().unwrap() as f32);
        assert_eq!(NF4.map(f32::to_bits), theirs.map(f32::to_bits));
        let theirs = "7.874015718698502e-3".parse::<f64>().unwrap() as f32;
        assert_eq!(INT8_FACTOR.to_bits(), theirs.to_bits());
    }

    /// `create_dynamic_map(signed=True, max_exponent_bits=7, total_bits=8)`: seven ranges of powers
    /// of ten, each with twice as many values as the one below, at the centres of equal intervals.
    #[test]
    fn the_values_of_scale_codes_are_those_of_bitsandbytes() {
        let mut theirs = vec![0.0, 1.0];
        for range in 0..7 {
            let (items, power) = (1 << range, 10f64.powi(range - 6));
            for item in 0..items {
                let bound = |at: i32| 0.1 + 0.9 * f64::from(at) / f64::from(items);
                let centre = power * (bound(item) + bound(item + 1)) / 2.0;
                theirs.extend([centre, -centre]);
            }
        }
        theirs.sort_by(f64::total_cmp);
        assert_eq!(theirs.len(), DYNAMIC.len());
        for (ours, theirs) in DYNAMIC.iter().zip(theirs) {
            assert!((f64::from(*ours) - theirs).abs() <= 4e-7 * theirs.abs(), "{ours} {theirs}");
        }
        // bitsandbytes computes them in f32. This is the sum of the bits that PyTorch 2.11 gives.
        let sum: u64 = DYNAMIC.iter().map(|value| u64::from(value.to_bits())).sum();
        assert_eq!(sum, 535_306_620_548);
    }
}
