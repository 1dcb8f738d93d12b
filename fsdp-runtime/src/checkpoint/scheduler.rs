//! Learning-rate schedulers' state as numbers. Burn's records show theirs only as a burnpack.

use burn::lr_scheduler::LrSchedulerRecord;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn_pack::{Reader, Writer};

use super::scalar::{Scalar, Scalars};

/// The numbers of a record.
pub(crate) fn scalars(record: &LrSchedulerRecord) -> Scalars {
    let bytes = record.clone().into_bytes().expect("numbers fit a burnpack in memory");
    let reader = Reader::from_bytes(bytes).expect("a burnpack just written can be read");
    reader.scalars().iter().map(|(name, value)| (name.clone(), Scalar::from(*value))).collect()
}

/// The scheduler with the given numbers.
///
/// # Errors
///
/// What differs, where they are another scheduler's.
pub(crate) fn with_scalars(
    scheduler: &ModuleLrScheduler,
    numbers: &Scalars,
) -> Result<ModuleLrScheduler, Vec<String>> {
    let own = scalars(&scheduler.to_record());
    let mut differences: Vec<String> = own
        .iter()
        .filter_map(|(name, own)| match numbers.get(name) {
            None => Some(format!("`{name}` is missing")),
            Some(other) if other.kind() != own.kind() => {
                Some(format!("`{name}` is {other}, not a {}", own.kind()))
            }
            Some(_) => None,
        })
        .collect();
    let unexpected = numbers.keys().filter(|name| !own.contains_key(*name));
    differences.extend(unexpected.map(|name| format!("`{name}` is unexpected")));
    if !differences.is_empty() {
        return Err(differences);
    }
    let mut writer = Writer::new(Vec::new());
    for (name, scalar) in numbers {
        writer = writer.with_scalar(name, (*scalar).into());
    }
    let record = writer.into_bytes().map_err(|error| vec![error.to_string()])?;
    let record = LrSchedulerRecord::from_bytes(record).map_err(|error| vec![error.to_string()])?;
    let loaded = scheduler.clone().load_record(record);
    let taken = scalars(&loaded.to_record());
    if taken != *numbers {
        return Err(vec!["its numbers are out of the scheduler's range".into()]);
    }
    Ok(loaded)
}
