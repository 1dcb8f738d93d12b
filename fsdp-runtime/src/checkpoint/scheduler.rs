//! State of learning-rate schedulers as numbers. Burn gives access to it only through a record's
//! serialised form, a burnpack.

use burn::lr_scheduler::LrSchedulerRecord;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn_pack::{Reader, Writer};

use super::scalar::{Scalar, Scalars};

/// Returns the numbers in a record.
pub(super) fn scalars(record: &LrSchedulerRecord) -> Scalars {
    let bytes = record.clone().into_bytes().expect("a record of numbers serialises in memory");
    let reader = Reader::from_bytes(bytes).expect("a burnpack just written is valid");
    reader.scalars().iter().map(|(name, value)| (name.clone(), Scalar::from(*value))).collect()
}

/// Returns a copy of the scheduler with the given numbers as its state.
///
/// # Errors
///
/// Every difference, where the numbers are those of another scheduler.
pub(super) fn with_scalars(
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
    if scalars(&loaded.to_record()) != *numbers {
        return Err(vec!["its numbers are out of the scheduler's range".into()]);
    }
    Ok(loaded)
}
