use std::ffi::OsString;

use super::variables::tasks;
use super::*;

fn read(variables: &[(&str, &str)]) -> Result<Option<RankEnv>, EnvError> {
    RankEnv::from_variables(|name| {
        variables.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value))
    })
}

const TORCH: [(&str, &str); 5] = [
    ("RANK", "3"),
    ("LOCAL_RANK", "1"),
    ("WORLD_SIZE", "4"),
    ("MASTER_ADDR", "node0"),
    ("MASTER_PORT", "29500"),
];

#[test]
fn the_variables_of_each_launcher_are_read() {
    let torchrun = read(&TORCH).unwrap().unwrap();
    assert_eq!((torchrun.rank.index(), torchrun.world.size(), torchrun.local_rank), (3, 4, 1));
    assert_eq!(torchrun.main_process, Some(MainProcess { host: "node0".into(), port: 29500 }));

    let mpi = read(&[
        ("OMPI_COMM_WORLD_RANK", "1"),
        ("OMPI_COMM_WORLD_SIZE", "2"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
    ]);
    let mpi = mpi.unwrap().unwrap();
    assert_eq!((mpi.rank.index(), mpi.launcher, mpi.main_process), (1, Launcher::OpenMpi, None));

    let slurm = read(&[
        ("SLURM_PROCID", "5"),
        ("SLURM_NTASKS", "64"),
        ("SLURM_STEP_NUM_TASKS", "8"),
        ("SLURM_LOCALID", "1"),
        ("SLURM_STEP_TASKS_PER_NODE", "4(x2)"),
    ]);
    let slurm = slurm.unwrap().unwrap();
    assert_eq!((slurm.rank.index(), slurm.world.size()), (5, 8));
    assert_eq!((slurm.launcher, slurm.local_world), (Launcher::Slurm, Some(4)));
    assert_eq!(
        (tasks("2"), tasks("4(x2),1"), tasks("2,1"), tasks("0")),
        (Some(2), None, None, None)
    );

    assert_eq!(read(&[]), Ok(None));
    assert_eq!(read(&[("SLURM_NTASKS", "8")]), Ok(None), "a batch script is not a rank");
}

#[test]
fn torchrun_under_slurm_is_not_an_error() {
    let mut variables = TORCH.to_vec();
    variables.extend([("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2"), ("SLURM_LOCALID", "0")]);
    assert_eq!(read(&variables).unwrap().unwrap().rank.index(), 3);
}

#[test]
fn torchrun_under_mpirun_is_an_error() {
    let mut variables = TORCH.to_vec();
    variables.extend([
        ("OMPI_COMM_WORLD_RANK", "0"),
        ("OMPI_COMM_WORLD_SIZE", "4"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
    ]);
    let text = read(&variables).unwrap_err().to_string();
    assert!(text.contains("started twice") && text.contains("rank 3 of 4"), "{text}");
    variables[5].1 = "3";
    assert!(read(&variables).is_ok(), "the two agree");
}

#[test]
fn errors_name_the_wrong_variable() {
    let change = |name: &str, value: &'static str| {
        let mut variables = TORCH.to_vec();
        for variable in &mut variables {
            if variable.0 == name {
                variable.1 = value;
            }
        }
        read(&variables).unwrap_err()
    };
    for (name, _) in TORCH {
        let error = change(name, "");
        assert!(matches!(error, EnvError::Missing { missing, .. } if missing == name), "{error}");
        if name != "MASTER_ADDR" {
            let error = change(name, "x1");
            let EnvError::NotANumber { variable, .. } = &error else { panic!("{error}") };
            assert_eq!(*variable, name);
            assert!(error.to_string().contains("`x1`"), "{error}");
        }
    }
    assert!(matches!(change("RANK", "4"), EnvError::RankOutOfWorld { rank: 4, .. }));
    assert!(matches!(change("RANK", "-1"), EnvError::NotANumber { variable: "RANK", .. }));
    assert!(matches!(change("WORLD_SIZE", "0"), EnvError::RankOutOfWorld { world: 0, .. }));
    assert!(matches!(change("MASTER_PORT", "70000"), EnvError::NotANumber { .. }));
}

#[test]
fn a_file_with_another_world_size_is_an_error() {
    let env = read(&TORCH).unwrap().unwrap();
    assert_eq!(env.check(None), Ok(()));
    let text = env.check(Some(2)).unwrap_err().to_string();
    assert!(text.contains("num_processes: 2") && text.contains("started 4"), "{text}");
}
