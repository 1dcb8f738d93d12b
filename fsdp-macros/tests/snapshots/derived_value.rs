#[derive(UnitValue)]
pub enum Step<T> {
    Done,
    Next(Tensor<3>, Vec<T>),
    Last { hidden: Tensor<3> },
}
